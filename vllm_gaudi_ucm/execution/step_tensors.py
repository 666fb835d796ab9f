"""The tensors that a step's model forward reads: one table, at true shapes and padded to a bucket.

An entry of `STEP_TENSORS` says what a tensor is: its values of a planned step, its size in a bucket, its pad. A new
input is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.row_tiles import row_tiles
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, is_bounded, levels
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import (
    CANDIDATE_ARRAYS,
    CHOICE_ARRAYS,
    SPAN_ARRAYS,
    SelectionTensors,
    pad_values,
)

ContiguousPa = Literal["auto"] | bool

Parts = tuple[str | None, ...]

NO_BLOCKS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_GROUP = -1
# Reading an unused block costs as much as reading one in use; gathering copies each block once (a read and a
# write) before it is read. So the slice wins while it covers at most about three blocks for each one in use.
SLICE_READ_LIMIT = 3.0


class StepArrays(NamedTuple):
    """A planned step, as entries of the table read it.

    shape: what it runs in: a bucket's shape, or its own. block_ids: where the unique part reads a slice of the cache,
    the place of each of its entries there; None: it gathers blocks.
    """

    plan: UnifiedPlan
    token_ids: NDArray[np.int64]
    summary_blocks: NDArray[np.int64]
    shape: ForwardShape
    block_ids: NDArray[np.int64] | None = None

    @property
    def parts(self) -> Parts:
        """What the step has; see StepTensor."""
        plan = self.plan
        return (
            "rows",
            None if plan.unique is None else "gathered unique" if self.block_ids is None else "unique",
            None if plan.causal is None else "causal",
            None if plan.shared is None else "shared",
            "summaries" if len(self.summary_blocks) else None,
            None if plan.selection is None else "selection",
        )


class Sizes(NamedTuple):
    """What sizes and pads in a bucket follow from. choices: of a sparse method, where one is on."""

    shape: ForwardShape
    limits: Limits
    choices: SelectionLimits | None

    @property
    def spans(self) -> int:
        """Requests, and a last entry for rows without a request, which sees nothing."""
        return min(self.shape.query_len, self.limits.max_num_seqs) + 1


@dataclass(frozen=True)
class StepTensor:
    """One tensor of a step.

    name: by which the forward finds it.
    values: its real entries in a planned step that has its part.
    size: its shape in a bucket; None: the bucket has no such tensor.
    pad: what fills a bucket up, or all of it where the step lacks the part: a number, or an array of the size.
    parts: it exists in steps with one of these parts.
    dtype: at true shape. In a bucket all tensors are int64, for they are pieces of one.
    by_block: where the unique part reads a slice of the cache, entry b speaks of physical block b.
    only: the one way of running that has it; in the other it is a constant, or not needed.
    """

    name: str
    values: Callable[[StepArrays], NDArray[Any]]
    size: Callable[[Sizes], tuple[int, ...] | None]
    pad: int | Callable[[Sizes], int | NDArray[np.int64]] = 0
    parts: tuple[str, ...] = ("rows",)
    dtype: type[np.integer[Any]] = np.int64
    by_block: bool = False
    only: Literal["bucket", "true shape"] | None = None

    def at_true_shape(self, step: StepArrays) -> NDArray[Any]:
        """The values alone."""
        found = self.values(step)
        if self.by_block and step.block_ids is not None:
            # a block of the slice that no row uses keeps an empty range
            found, used = np.zeros(step.shape.unique_blocks, self.dtype), found
            found[step.block_ids] = used
        return found if found.dtype == self.dtype else found.astype(self.dtype)

    def fill(self, whole: NDArray[np.int64], step: StepArrays, pad: int | NDArray[np.int64]) -> None:
        """Writes the values and the pad into a bucket's array."""
        values = self.values(step)
        if self.by_block and step.block_ids is not None:
            whole[...] = pad
            whole[step.block_ids] = values
        elif whole.ndim == 1:
            count = len(values)
            whole[:count] = values
            whole[count:] = pad
        else:
            whole[...] = pad
            whole[: values.shape[0], : values.shape[1]] = values


def _rows(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.shape.query_len,)


def _causal(sizes: Sizes) -> tuple[int, ...] | None:
    return (sizes.shape.query_len,) if "c" in sizes.shape.phase else None


def _tiles(sizes: Sizes) -> tuple[int, ...] | None:
    rows, most = sizes.shape.query_len, sizes.shape.causal_reach
    return (2, levels(rows, most)[0]) if is_bounded(rows, most) else None


def _place_tiles(plan: UnifiedPlan | None, shape: ForwardShape) -> NDArray[np.int64]:
    """[2, tiles] first and last row of each tile."""
    rows, most = shape.query_len, shape.causal_reach
    return np.stack(row_tiles(plan).places(rows, levels(rows, most)[0]))


def _shared(sizes: Sizes) -> tuple[int, ...] | None:
    return (sizes.shape.shared_blocks,) if sizes.shape.shared_blocks else None


def _unique(sizes: Sizes) -> tuple[int, ...] | None:
    return (sizes.shape.unique_blocks,) if sizes.shape.unique_blocks else None


def _never(sizes: Sizes) -> None:
    return None


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


_UNIQUE = ("unique", "gathered unique")

STEP_TENSORS: tuple[StepTensor, ...] = (
    StepTensor("token_ids", attrgetter("token_ids"), _rows),
    StepTensor("positions", attrgetter("plan.positions"), _rows),
    StepTensor("slots", attrgetter("plan.slots"), _rows, DUMMY_BLOCK),
    StepTensor("groups", attrgetter("plan.causal.groups"), _causal, NO_GROUP, ("causal",), np.int32),
    StepTensor(
        "tiles",
        lambda step: _place_tiles(step.plan, step.shape),
        _tiles,
        lambda sizes: _place_tiles(None, sizes.shape),
        only="bucket",
    ),
    StepTensor("shared_blocks", attrgetter("plan.shared.blocks"), _shared, DUMMY_BLOCK, ("shared",)),
    StepTensor(
        "row_spans",
        attrgetter("plan.row_requests"),
        lambda sizes: _rows(sizes) if sizes.shape.shared_blocks else None,
        # rows that are no request's
        lambda sizes: sizes.spans - 1,
        ("shared",),
    ),
    StepTensor("shared_lo", attrgetter("plan.shared.lo"), _never, 0, ("shared",), np.int32, only="true shape"),
    StepTensor(
        "shared_hi",
        attrgetter("plan.shared.hi"),
        lambda sizes: (sizes.spans, sizes.shape.shared_blocks) if sizes.shape.shared_blocks else None,
        0,
        ("shared",),
        np.int32,
    ),
    StepTensor(
        "unique_blocks",
        attrgetter("plan.unique.blocks"),
        lambda sizes: None if sizes.limits.contiguous else _unique(sizes),
        DUMMY_BLOCK,
        ("gathered unique",),
    ),
    StepTensor("unique_rows", attrgetter("plan.unique.rows"), _unique, 0, _UNIQUE, by_block=True),
    StepTensor("unique_lo", attrgetter("plan.unique.lo"), _never, 0, _UNIQUE, np.int32, True, "true shape"),
    StepTensor("unique_hi", attrgetter("plan.unique.hi"), _unique, 0, _UNIQUE, np.int32, by_block=True),
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
_KNOWN = frozenset(entry.name for entry in STEP_TENSORS)


def added_names(table: Sequence[StepTensor]) -> list[str]:
    """Of the entries that are not in `STEP_TENSORS`."""
    return [entry.name for entry in table if entry.name not in _KNOWN]


class StepInputs(NamedTuple):
    """What the forward of a step reads. Rows are query tokens in flat order.

    token_ids, positions, slots: int64 [rows].
    summary_blocks: int64 [blocks] to be summarised, where a sparse method is on.
    selection: the choices of the step, where it has any.
    others: tensors of entries that were added to the table, by name.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parts: AttentionParts
    summary_blocks: torch.Tensor | None
    selection: SelectionTensors | None
    others: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        tensors: dict[str, torch.Tensor],
        parts: AttentionParts,
        choices: SelectionLimits | None,
        added: Sequence[str],
    ) -> StepInputs:
        """parts: without the selected one. choices: of a step that has any. added: names for `others`."""
        selection = None
        if choices is not None:
            selection = SelectionTensors.of(tensors, choices)
            parts = parts._replace(selected=selection.chosen_part())
        others = {name: tensors[name] for name in added if name in tensors}
        rows = tensors["token_ids"], tensors["positions"], tensors["slots"]
        return cls(*rows, parts, tensors.get("summary_blocks"), selection, others)


def true_shape(plan: UnifiedPlan, unique_blocks: int) -> Bucket:
    """The bucket of a step before any padding; `unique_blocks` counts those that are read, in use or not."""
    return Bucket(
        phase=phase_string(plan.causal is not None, plan.shared is not None, plan.unique is not None),
        query_len=plan.num_rows,
        shared_blocks=0 if plan.shared is None else len(plan.shared.blocks),
        unique_blocks=unique_blocks,
        logits=len(plan.logits_rows),
        selected_blocks=0 if plan.selection is None else len(plan.selection.choice_spans),
        causal_reach=_least_tiles(plan),
    )


def _least_tiles(plan: UnifiedPlan) -> int:
    """The least of a bucket that holds the step, where that says more than its number of rows."""
    if plan.causal is None or not is_bounded(plan.num_rows, 1):
        return ALL_TILES
    least = row_tiles(plan).reach
    return least if is_bounded(plan.num_rows, least) else ALL_TILES


class TrueShapeTensors:
    """The tensors of steps at their true shapes, each copied by itself; on a CPU nothing is copied.

    Args:
        device: where the model runs.
        contiguous_pa: read the unique blocks as one contiguous slice of the cache (True), gather them by id (False), or
            choose by bytes ("auto"), so that prefix caching and contiguous KV work together.
        choices: sizes of the choices of a sparse method, where one is on.
        table: what a step has.
        by_token: entries of the unique part may be few tokens of a block, so that these are counted.
    """

    def __init__(
        self,
        device: torch.device,
        contiguous_pa: ContiguousPa = "auto",
        choices: SelectionLimits | None = None,
        table: Sequence[StepTensor] = STEP_TENSORS,
        *,
        by_token: bool = False,
    ) -> None:
        self._by_token = by_token
        self._device = device
        self._is_host = device.type == "cpu"
        self._contiguous_pa = contiguous_pa
        self._choices = choices
        self._table = [entry for entry in table if entry.only != "bucket"]
        self._added = added_names(table)
        self._entries: dict[Parts, list[StepTensor]] = {}

    def stage(
        self, plan: UnifiedPlan, token_ids: NDArray[np.int64], summary_blocks: NDArray[np.int64] = NO_BLOCKS
    ) -> tuple[StepInputs, Bucket]:
        """The tensors of a step, and its true shape."""
        block_ids, unique_blocks = self._unique_blocks(plan)
        choices = None if plan.selection is None else self._room_for(plan.selection)
        shape = true_shape(plan, unique_blocks)
        step = StepArrays(plan, token_ids, summary_blocks, shape.forward, block_ids)
        tensors = {entry.name: self._tensor(entry.at_true_shape(step)) for entry in self._entries_of(step.parts)}
        return StepInputs.of(tensors, self._parts(plan, tensors), choices, self._added), shape

    def _entries_of(self, parts: Parts) -> list[StepTensor]:
        found = self._entries.get(parts)
        if found is None:
            found = self._entries[parts] = [e for e in self._table if not set(parts).isdisjoint(e.parts)]
        return found

    def _room_for(self, selection: SelectionPlan) -> SelectionLimits:
        assert self._choices is not None, "a choice without a sparse method"
        longest = int(selection.num_rows.max())
        if longest <= self._choices.max_rows:
            return self._choices
        # a prompt remainder; kernels are compiled by this number, so that it has few values
        return replace(self._choices, max_rows=1 << (longest - 1).bit_length())

    def _unique_blocks(self, plan: UnifiedPlan) -> tuple[NDArray[np.int64] | None, int]:
        """Where the entries of the unique part stand in a slice of the cache (None: it gathers), and blocks read."""
        if plan.unique is None:
            return None, 0
        blocks = plan.unique.blocks
        slice_len = int(blocks.max()) + 1
        reads_slice = self._contiguous_pa
        if reads_slice == "auto":
            reads_slice = slice_len <= SLICE_READ_LIMIT * len(blocks)
        return (blocks, slice_len) if reads_slice else (None, len(blocks))

    def _parts(self, plan: UnifiedPlan, tensors: dict[str, torch.Tensor]) -> AttentionParts:
        causal = shared = unique = None
        if plan.causal is not None:
            causal = CausalPart(tensors["groups"], tuple(CausalSlice(*bounds) for bounds in plan.causal.slices))
        if plan.shared is not None:
            groups = tuple(SharedGroup(self._tensor(rows), lo, hi) for rows, lo, hi in plan.shared.groups)
            ranges = tensors["shared_lo"], tensors["shared_hi"]
            shared = SharedPart(tensors["shared_blocks"], tensors["row_spans"], *ranges, groups)
        if plan.unique is not None:
            ranges = tensors["unique_lo"], tensors["unique_hi"]
            count = int((plan.unique.hi - plan.unique.lo).sum()) if self._by_token else None
            blocks, rows = tensors.get("unique_blocks"), tensors["unique_rows"]
            unique = UniquePart(blocks, rows, *ranges, plan.num_single, num_tokens=count)
        return AttentionParts(causal, shared, unique)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._is_host else tensor.to(self._device, non_blocking=True)
