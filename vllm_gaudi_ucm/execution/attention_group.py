"""Groups of layers with attention: over whole contexts, windows or chunks, with keys and values or with latents."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.attention.latent import LatentAttention, LatentSizes
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, PlanOfGroup, UnifiedPlan
from vllm_gaudi_ucm.batch.division import divide_batch
from vllm_gaudi_ucm.batch.group_planner import AttentionPlanner
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.planned_step import NO_BLOCKS
from vllm_gaudi_ucm.execution.bucket_parts import BucketParts, group_blocks
from vllm_gaudi_ucm.execution.cache_group import CacheGroup, Tensors, ToDevice
from vllm_gaudi_ucm.execution.step_sizes import (
    Size,
    Sizes,
    of_causal_rows,
    of_first_tokens,
    of_rows,
    of_tiles,
)
from vllm_gaudi_ucm.execution.step_tensors import StepArrays, StepTensor, group_suffix, place_tiles
from vllm_gaudi_ucm.graphs.shapes.group_room import GroupBlocks
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.chosen_tokens.api import most_seen
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.unified_attention.api import Plan, prepare
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection
from vllm_gaudi_ucm.sparse.selection.selection_tensors import (
    CANDIDATE_ARRAYS,
    CHOICE_ARRAYS,
    SPAN_ARRAYS,
    SelectionTensors,
    pad_values,
)
from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec
from vllm_gaudi_ucm.vllm_api.model import Attention, ChunkedLocalAttention

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker

StepMetadata = UnifiedAttentionMetadata | GroupedMetadata
"""The metadata that layers read: of one KV-cache group, or of each."""

NO_GROUP = -1


class AttentionInputs(NamedTuple):
    """The inputs of a group. slots: int64 [rows], where keys and values are written. parts: the parts of attention."""

    slots: torch.Tensor
    parts: AttentionParts


class AttentionGroup(CacheGroup):
    """A group with attention; see CacheGroup. The first group of an engine is one: buckets count its blocks."""

    spec = AttentionSpec
    layer_classes: ClassVar[tuple[type, ...]] = (Attention, ChunkedLocalAttention, LatentAttention)

    def planner(self, causal_slice: int, batches: int) -> AttentionPlanner:
        return AttentionPlanner(self.kv, causal_slice, batches)

    def tensors(self, number: int) -> tuple[StepTensor, ...]:
        return attention_tensors(number, self.kv)

    def blocks(self, plan: PlanOfGroup) -> tuple[GroupBlocks, int | None]:
        own = cast(GroupPlan, plan)
        shared = 0 if own.shared is None else len(own.shared.blocks)
        return GroupBlocks(shared, 0 if own.unique is None else len(own.unique.blocks)), self.kv.most_blocks

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Returns one part in most cases: requests that share blocks in one group also share them in the others."""
        most = self.kv.most_blocks
        if room is None or (most is not None and most * len(batch.num_scheduled) <= room.shared_blocks):
            return super().divide(batch, room)
        return divide_batch(batch, self.kv.block_size, room, window=self.kv.window)

    def at_true_shape(
        self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice
    ) -> AttentionInputs:
        return AttentionInputs(tensors["slots"], _true_parts(plan, cast(GroupPlan, own), tensors, to_device))

    def in_buckets(self, number: int, limits: Limits, causal_slice: int, device: torch.device) -> _InBuckets:
        return _InBuckets(BucketParts(number, self.kv, limits, causal_slice, device))

    def metadata(self, inputs: AttentionInputs, implementation: str, plan: Plan | None) -> UnifiedAttentionMetadata:
        return step_metadata(inputs.slots, inputs.parts, self.kv.block_size, implementation, None, plan=plan)


ONE_GROUP = (AttentionGroup(KvGroup(0, 1)),)
"""All layers in one group with full attention, if nothing depends on its block size."""


class _InBuckets(NamedTuple):
    """Makes the inputs of an attention group in buckets; see GroupInBuckets."""

    parts: BucketParts

    def make_inputs(self, shape: ForwardShape, tensors: Tensors) -> AttentionInputs:
        return AttentionInputs(tensors["slots"], self.parts.attention_parts(shape, tensors))

    def refill(self) -> None:
        self.parts.refill()


def _true_parts(plan: UnifiedPlan, own: GroupPlan, tensors: Tensors, to_device: ToDevice) -> AttentionParts:
    causal = shared = unique = None
    if own.causal is not None:
        slices = tuple(CausalSlice(*bounds) for bounds in own.causal.slices)
        causal = CausalPart(tensors["groups"], slices, first_rows=_if_any(own.causal.first_rows, to_device))
    if own.shared is not None:
        shared = SharedPart(
            tensors["shared_blocks"],
            tensors["row_spans"],
            tensors["shared_lo"],
            tensors["shared_hi"],
            tuple(SharedGroup(to_device(rows), lo, hi) for rows, lo, hi in own.shared.groups),
            rise=_if_any(own.shared.rise, to_device),
            most_of_span=own.shared.most_of_request,
        )
    if own.unique is not None:
        unique = UniquePart(
            tensors.get("unique_blocks"),
            tensors["unique_rows"],
            tensors["unique_lo"],
            tensors["unique_hi"],
            plan.num_single,
            num_tokens=own.unique.num_tokens,
            most_of_row=int(np.bincount(own.unique.rows).max(initial=0)),
            places=tensors.get("unique_places"),
        )
    return AttentionParts(causal, shared, unique, positions=tensors["positions"])


def _if_any(array: NDArray[np.int64] | None, to_device: ToDevice) -> torch.Tensor | None:
    return None if array is None else to_device(array)


def attention_tensors(number: int, group: KvGroup) -> tuple[StepTensor, ...]:
    """Returns the tensors of a step in an attention group.

    A bucket may read the unique blocks of the first group as a slice of the cache; a slice for another group would span
    the blocks of all groups. Tensors for the rows that attend to each other, and for the choice of a sparse method,
    exist once, in the first group.

    number: the group's place.
    """
    leads, end = not number, group_suffix(number)
    room = _Room(number, group)
    get = _values(number)
    windowed = room.windowed

    def entry(
        name: str,
        values: Callable[[StepArrays], NDArray[np.int64]],
        size: Size,
        pad: int | Callable[[Sizes], int] = 0,
        *parts: str,
        **others: object,
    ) -> StepTensor:
        return StepTensor(name + end, values, size, pad, tuple(part + end for part in parts), **others)  # type: ignore[arg-type]

    unique = ("gathered unique", "unique") if leads else ("unique",)
    common = (
        StepTensor("slots" + end, get("slots"), of_rows, DUMMY_BLOCK),
        entry("shared_blocks", get("shared.blocks"), room.shared, DUMMY_BLOCK, "shared"),
        # pads: rows that belong to no request
        entry("row_spans", attrgetter("plan.row_requests"), room.shared_rows, lambda s: s.spans - 1, "shared"),
        entry("shared_lo", get("shared.lo"), windowed(room.ranges), 0, "shared", dtype=np.int32),
        entry("shared_hi", get("shared.hi"), room.ranges, 0, "shared", dtype=np.int32),
        entry("shared_rise", get("shared.rise"), windowed(room.shared_rows), 0, "shared", only="bucket"),
        entry("causal_first_rows", get("causal.first_rows"), windowed(of_causal_rows), 0, "causal", only="bucket"),
        entry("unique_blocks", get("unique.blocks"), room.gathered, DUMMY_BLOCK, unique[0]),
        entry("unique_rows", get("unique.rows"), room.unique, 0, *unique, by_block=leads),
        entry("unique_lo", get("unique.lo"), room.unique_lo, 0, *unique, dtype=np.int32, by_block=leads),
        entry("unique_hi", get("unique.hi"), room.unique, 0, *unique, dtype=np.int32, by_block=leads),
    )
    places = entry("unique_places", _places(number), room.unique, 0, *unique, by_block=leads)
    chosen = (places,) if group.chooses_tokens else ()
    return (*common, *chosen, *_OF_FIRST) if leads else (*common, *chosen)


def _values(number: int) -> Callable[[str], Callable[[StepArrays], NDArray[np.int64]]]:
    """Returns a function that makes getters of a path in the group's plan; a window that hides nothing has pads."""

    def get(path: str) -> Callable[[StepArrays], NDArray[np.int64]]:
        found = attrgetter(path)

        def values(step: StepArrays) -> NDArray[np.int64]:
            array: NDArray[np.int64] | None = found(step.plan.groups[number])
            return NO_BLOCKS if array is None else array

        return values

    return get


def _places(number: int) -> Callable[[StepArrays], NDArray[np.int64]]:
    """Returns a getter of the place of each unique block among its row's."""

    def values(step: StepArrays) -> NDArray[np.int64]:
        unique = cast(GroupPlan, step.plan.groups[number]).unique
        if unique is None:
            return NO_BLOCKS
        count = np.bincount(unique.rows)
        return np.arange(len(unique.rows)) - (count.cumsum() - count)[unique.rows]

    return values


class _Room(NamedTuple):
    """Sizes of a group's tensors in a bucket; the bucket's own sizes are those of the first group."""

    number: int
    group: KvGroup

    def _blocks(self, sizes: Sizes) -> GroupBlocks:
        return group_blocks(self.number, self.group, sizes.shape, sizes.limits)

    def shared(self, sizes: Sizes) -> tuple[int, ...] | None:
        blocks = self._blocks(sizes).shared
        return (blocks,) if blocks else None

    def shared_rows(self, sizes: Sizes) -> tuple[int, ...] | None:
        return of_rows(sizes) if self._blocks(sizes).shared else None

    def ranges(self, sizes: Sizes) -> tuple[int, ...] | None:
        blocks = self._blocks(sizes).shared
        return (sizes.spans, blocks) if blocks else None

    def unique(self, sizes: Sizes) -> tuple[int, ...] | None:
        blocks = self._blocks(sizes).unique
        return (blocks,) if blocks else None

    def gathered(self, sizes: Sizes) -> tuple[int, ...] | None:
        return None if sizes.limits.contiguous and not self.number else self.unique(sizes)

    def unique_lo(self, sizes: Sizes) -> tuple[int, ...] | None:
        """Returns None if rows see whole contexts: ranges begin at a block's first token; no operator compares."""
        strips = bool(sizes.limits.strip) and not self.number
        return self.unique(sizes) if strips or self._has_window(sizes) else None

    def windowed(self, size: Size) -> Size:
        """Returns the size of a tensor that only windows need."""
        return lambda sizes: size(sizes) if self._has_window(sizes) else None

    def _has_window(self, sizes: Sizes) -> bool:
        return bool(sizes.limits.window) if not self.number else self.group.window is not None


def _selection_tensor(name: str, size: Callable[[SelectionLimits, ForwardShape], int]) -> StepTensor:
    def in_bucket(sizes: Sizes) -> tuple[int, ...] | None:
        if not sizes.shape.selected_blocks:
            return None
        assert sizes.choices is not None, "selected blocks without a sparse method"
        return (size(sizes.choices, sizes.shape),)

    def pad(sizes: Sizes) -> int:
        assert sizes.choices is not None
        return pad_values(sizes.choices.spans(sizes.shape.query_len), sizes.choices)[name]

    return StepTensor(name, attrgetter(f"plan.selection.{name}"), in_bucket, pad, ("selection",))


_OF_FIRST = (
    StepTensor("groups", attrgetter("plan.causal.groups"), of_causal_rows, NO_GROUP, ("causal",), np.int32),
    StepTensor(
        "tiles",
        lambda step: place_tiles(step.plan, step.shape),
        of_tiles,
        lambda sizes: place_tiles(None, sizes.shape),
        only="bucket",
    ),
    StepTensor("shared_from", attrgetter("plan.shared.first_tokens"), of_first_tokens, 0, ("shared",), only="bucket"),
    StepTensor(
        "summary_blocks",
        attrgetter("summary_blocks"),
        lambda sizes: None if sizes.choices is None else (sizes.choices.summaries(sizes.shape.query_len),),
        DUMMY_BLOCK,
        ("summaries",),
    ),
    *(_selection_tensor(name, lambda choices, shape: choices.spans(shape.query_len)) for name in SPAN_ARRAYS),
    *(
        _selection_tensor(name, lambda choices, shape: choices.candidates(shape.query_len, shape.selected_blocks))
        for name in CANDIDATE_ARRAYS
    ),
    *(_selection_tensor(name, lambda choices, shape: shape.selected_blocks) for name in CHOICE_ARRAYS),
)


def step_metadata(
    slots: torch.Tensor,
    parts: AttentionParts,
    block_size: int,
    implementation: str,
    sparse: SparseWorker | None,
    summary_blocks: torch.Tensor | None = None,
    selection: SelectionTensors | None = None,
    *,
    reused: bool = False,
    plan: Plan | None = None,
    room: torch.Tensor | None = None,
    latent: LatentSizes | None = None,
    chosen: int = 0,
) -> UnifiedAttentionMetadata:
    """Prepares a step's parts for the layers of one KV-cache group, and also for dense layers if there are any.

    latent: sizes if all layers have latent attention. chosen: most tokens that each row chooses by itself (DSA); 0 for
    other models. See UnifiedAttentionMetadata, LayerSelection and `prepare` for the other arguments.
    """
    new_tokens, chooses = None, bool(chosen) and most_seen(parts, block_size) > chosen
    if latent is not None and sparse is None and latent.divides(parts):
        new_tokens = prepare(AttentionParts(parts.causal), block_size, implementation=implementation, plan=plan)
        if new_tokens.implementation.gives_log_sums:
            parts = parts._replace(causal=None)
        else:
            new_tokens = None
    prepared = prepare(parts, block_size, implementation=implementation, plan=plan)
    choices = None
    if selection is not None:
        dense_parts = None
        if sparse is not None and sparse.has_dense_layers:
            whole = parts._replace(selected=selection.candidates_part(block_size))
            dense_parts = prepare(whole, block_size, implementation=implementation, plan=plan)
        name = AUTO if sparse is None else sparse.implementation
        at_once = prepared.implementation.name == "native" and name in ("native", AUTO)
        choices = LayerSelection(
            selection, dense_parts, reused, at_once, room=room, implementation=name, parts=prepared
        )
    # layers without summaries and choices get the same metadata as in a dense server, and are as fast
    if sparse is None or (choices is None and summary_blocks is None and not sparse.watches_layers):
        return UnifiedAttentionMetadata(slots, prepared, None, summary_blocks, choices, new_tokens, chooses=chooses)
    return UnifiedAttentionMetadata(slots, prepared, sparse.method, summary_blocks, choices)
