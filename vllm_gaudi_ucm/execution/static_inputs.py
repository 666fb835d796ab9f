"""The tensors of a bucket: preallocated, their shapes a function of the bucket alone, filled by one copy per step."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import SharedPlan, UnifiedPlan, UniquePlan
from vllm_gaudi_ucm.batch.row_tiles import RowTiles, row_tiles
from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import is_bounded, levels
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    CausalTiles,
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
    selection_arrays,
)

NO_GROUP = -1
# Rows that Gaudi's matrix engine multiplies at once.
SHORTEST_SLICE = 128


class ForwardInputs(NamedTuple):
    """What the forward of a bucket reads.

    token_ids, positions, slots: int64 [query_len].
    summary_blocks: int64 [blocks] to be summarised, where a sparse method is on.
    selection: the choices of the step, in shapes with selected blocks.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parts: AttentionParts
    summary_blocks: torch.Tensor | None = None
    selection: SelectionTensors | None = None


class _Layout:
    """Where each array of a forward shape lies in its flat tensor: name -> (first, shape)."""

    def __init__(self, shape: ForwardShape, limits: Limits, choices: SelectionLimits | None) -> None:
        q, s, u = shape.query_len, shape.shared_blocks, shape.unique_blocks
        self.places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.size = 0
        self._add((q,), "token_ids", "positions", "slots")
        if "c" in shape.phase:
            self._add((q,), "groups")
        if is_bounded(q, shape.causal_reach):
            self._add((levels(q, shape.causal_reach)[0],), "tile_first", "tile_last")
        if s:
            self._add((s,), "shared_blocks")
            self._add((q,), "row_spans")
            # rows that are no request's use the last span, which sees nothing
            self._add((min(q, limits.max_num_seqs) + 1, s), "shared_hi")
        if u:
            self._add((u,), "unique_rows", "unique_hi")
        if u and not limits.contiguous:
            self._add((u,), "unique_blocks")
        if choices is not None:
            self._add((choices.summaries(q),), "summary_blocks")
        if k := shape.selected_blocks:
            assert choices is not None, "selected blocks without a sparse method"
            self._add((choices.spans(q),), *SPAN_ARRAYS)
            self._add((choices.candidates(q, k),), *CANDIDATE_ARRAYS)
            self._add((k,), *CHOICE_ARRAYS)

    def _add(self, shape: tuple[int, ...], *names: str) -> None:
        for name in names:
            first, self.size = self.size, self.size + math.prod(shape)
            self.places[name] = (slice(first, self.size), shape)


class StaticInputs:
    """One host buffer for all, one flat device tensor per forward shape and one per number of logits rows.

    A step fills the whole tensor of its bucket: real values first, then pads, which point at the dummy block, at no
    group and at a span that sees nothing. So nothing of an earlier step is ever read. A graph gets the flat tensor and
    cuts it itself (`split`): copying into a part of a larger tensor would be a recipe of its own on Gaudi.

    A copy from a pinned buffer is queued behind whatever the device still has to do: the graph of the step before, if
    nobody waited for that step (prompt chunks that yield no token). The buffer is not written before that has ended.

    Args:
        limits: of the steps; `contiguous` decides whether the unique part reads a slice of the cache or gathers.
        causal_slice: rows per slice of the causal part.
        device: where the model runs.
        pin_memory: whether the host buffer is pinned, so that the host goes on while it is copied.
        choices: sizes of the choices of a sparse method, where one is on.
    """

    def __init__(
        self,
        limits: Limits,
        causal_slice: int,
        device: torch.device,
        pin_memory: bool = False,
        choices: SelectionLimits | None = None,
    ) -> None:
        self._limits = limits
        self._choices = choices
        self._causal_slice = causal_slice
        self._device = device
        largest = limits.maximum.forward.with_reach(1)
        size = max(_Layout(largest, limits, choices).size, limits.max_num_seqs)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=pin_memory)
        self._array: NDArray[np.int64] = self._host.numpy()
        # the end of the last copy; without pinned memory a copy has ended when it returns
        self._copied = torch.Event(device) if pin_memory else None
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(limits.max_num_batched_tokens, device=device)
        self._layouts: dict[ForwardShape, _Layout] = {}
        self._flat: dict[ForwardShape | int, torch.Tensor] = {}

    def fill(
        self,
        bucket: Bucket,
        plan: UnifiedPlan,
        token_ids: NDArray[np.int64],
        summary_blocks: NDArray[np.int64] | tuple[()] = (),
    ) -> torch.Tensor:
        """Copies a step into the flat tensor of its bucket, which must dominate it, and returns that."""
        self._wait_for_copy()
        arrays = self._arrays(bucket.forward)
        _pad(arrays["token_ids"], token_ids, 0)
        _pad(arrays["positions"], plan.positions, 0)
        _pad(arrays["slots"], plan.slots, DUMMY_BLOCK)
        if "groups" in arrays:
            _pad(arrays["groups"], () if plan.causal is None else plan.causal.groups, NO_GROUP)
        if "tile_first" in arrays:
            _fill_tiles(arrays, row_tiles(plan))
        if "shared_hi" in arrays:
            _fill_shared(arrays, plan.shared, plan.row_requests)
        if "unique_hi" in arrays:
            self._fill_unique(arrays, plan.unique)
        if "summary_blocks" in arrays:
            _pad(arrays["summary_blocks"], summary_blocks, DUMMY_BLOCK)
        if "choice_spans" in arrays:
            self._fill_selection(arrays, plan.selection)
        return self._copy(bucket.forward, self._layout(bucket.forward).size)

    def fill_pads(self, shape: ForwardShape) -> torch.Tensor:
        """The flat tensor of a shape with pads only: warm-up executes the graph and touches no request's cache."""
        self._wait_for_copy()
        for name, array in self._arrays(shape).items():
            array.fill(NO_GROUP if name == "groups" else 0)
            if name == "shared_hi":
                self._arrays(shape)["row_spans"].fill(len(array) - 1)
            if name == "tile_last":
                _fill_tiles(self._arrays(shape), row_tiles(None))
        if shape.selected_blocks:
            self._fill_selection(self._arrays(shape), None)
        return self._copy(shape, self._layout(shape).size)

    def fill_logits_rows(self, logits: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """int64 [logits]: rows of the step that ran last, at most `logits`; pads repeat row 0."""
        self._wait_for_copy()
        _pad(self._array[:logits], rows, 0)
        return self._copy(logits, logits)

    def split(self, flat: torch.Tensor, shape: ForwardShape) -> ForwardInputs:
        """The arrays in a flat tensor, as views; their phase is the shape's, or it is an error."""
        tensors = {name: flat[place].view(size) for name, (place, size) in self._layout(shape).places.items()}
        parts = AttentionParts(
            causal=self._causal(shape, tensors) if "groups" in tensors else None,
            shared=self._shared(shape, tensors) if "shared_hi" in tensors else None,
            unique=self._unique(shape, tensors) if "unique_hi" in tensors else None,
        )
        phase = phase_string(*(part is not None for part in parts[:3]))
        if phase != shape.phase:
            raise ValueError(f"bucket {list(shape)}: its tensors make the phase {phase!r}")
        selection = None
        if shape.selected_blocks:
            assert self._choices is not None
            selection = SelectionTensors.of(tensors, self._choices)
            parts = parts._replace(selected=selection.chosen_part())
        return ForwardInputs(
            tensors["token_ids"],
            tensors["positions"],
            tensors["slots"],
            parts,
            tensors.get("summary_blocks"),
            selection,
        )

    def _fill_selection(self, arrays: dict[str, NDArray[np.int64]], plan: SelectionPlan | None) -> None:
        assert self._choices is not None
        real = {} if plan is None else selection_arrays(plan, self._choices)
        for name, pad in pad_values(len(arrays["first_rows"]), self._choices).items():
            _pad(arrays[name], real.get(name, ()), pad)

    def _fill_unique(self, arrays: dict[str, NDArray[np.int64]], plan: UniquePlan | None) -> None:
        rows, hi, blocks = arrays["unique_rows"], arrays["unique_hi"], arrays.get("unique_blocks")
        if blocks is not None:
            _pad(blocks, () if plan is None else plan.blocks, DUMMY_BLOCK)
            _pad(rows, () if plan is None else plan.rows, 0)
            _pad(hi, () if plan is None else plan.hi, 0)
            return
        # entry b speaks of physical block b: blocks that no single row uses keep an empty range
        rows.fill(0)
        hi.fill(0)
        if plan is not None:
            rows[plan.blocks], hi[plan.blocks] = plan.rows, plan.hi

    def _copy(self, key: ForwardShape | int, size: int) -> torch.Tensor:
        flat = self._flat.get(key)
        if flat is None:
            flat = self._flat[key] = torch.zeros(size, dtype=torch.int64, device=self._device)
        flat.copy_(self._host[:size], non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()
        return flat

    def _wait_for_copy(self) -> None:
        """Before the host buffer is written."""
        if self._copied is not None:
            self._copied.synchronize()

    def _arrays(self, shape: ForwardShape) -> dict[str, NDArray[np.int64]]:
        return {name: self._array[place].reshape(size) for name, (place, size) in self._layout(shape).places.items()}

    def _layout(self, shape: ForwardShape) -> _Layout:
        found = self._layouts.get(shape)
        if found is None:
            found = self._layouts[shape] = _Layout(shape, self._limits, self._choices)
        return found

    def _causal(self, shape: ForwardShape, tensors: dict[str, torch.Tensor]) -> CausalPart:
        """Which rows are one request's is data: a slice sees as many rows before it as a request has at most."""
        q, step, longest = shape.query_len, self._causal_slice, self._limits.max_model_len
        if q > longest:
            # packed prompts: all rows of a slice look back as far as its first, so short slices waste less
            step = min(step, max(SHORTEST_SLICE, longest // 4))
        before = longest - 1
        slices = (
            CausalSlice(lo, min(lo + step, q), max(0, lo - before), min(lo + step, q)) for lo in range(0, q, step)
        )
        tiles = None
        if "tile_first" in tensors:
            rows, tops = prompt_tiles.TILE_ROWS, levels(q, shape.causal_reach)
            tiles = CausalTiles(tensors["tile_first"], tensors["tile_last"], rows, tops)
        return CausalPart(tensors["groups"], tuple(slices), tiles)

    def _shared(self, shape: ForwardShape, tensors: dict[str, torch.Tensor]) -> SharedPart:
        hi = tensors["shared_hi"]
        everything = SharedGroup(self._row_numbers[: shape.query_len], 0, shape.shared_blocks)
        return SharedPart(
            tensors["shared_blocks"], tensors["row_spans"], self._zero.expand(hi.shape), hi, (everything,)
        )

    def _unique(self, shape: ForwardShape, tensors: dict[str, torch.Tensor]) -> UniquePart:
        hi = tensors["unique_hi"]
        return UniquePart(
            blocks=None if self._limits.contiguous else tensors["unique_blocks"],
            rows=tensors["unique_rows"],
            lo=self._zero.expand(hi.shape),
            hi=hi,
            num_rows=min(shape.query_len, self._limits.max_decode_rows),
        )


def _fill_tiles(arrays: dict[str, NDArray[np.int64]], tiles: RowTiles) -> None:
    first, last = arrays["tile_first"], arrays["tile_last"]
    first[:], last[:] = tiles.places(len(arrays["token_ids"]), len(first))


def _fill_shared(arrays: dict[str, NDArray[np.int64]], plan: SharedPlan | None, spans: NDArray[np.int64]) -> None:
    hi = arrays["shared_hi"]
    hi.fill(0)
    dummy_span = len(hi) - 1
    if plan is None:
        arrays["shared_blocks"].fill(DUMMY_BLOCK)
        arrays["row_spans"].fill(dummy_span)
        return
    _pad(arrays["shared_blocks"], plan.blocks, DUMMY_BLOCK)
    _pad(arrays["row_spans"], spans, dummy_span)
    requests, blocks = plan.hi.shape
    hi[:requests, :blocks] = plan.hi


def _pad(whole: NDArray[np.int64], real: NDArray[np.integer] | tuple[()], pad: int) -> None:
    count = len(real)
    whole[:count] = real
    whole[count:] = pad
