"""Block selection on CPU in C++ (ops/cpu/native/source/block_scores.cpp, block_choice.cpp): one call per operation.

A function returns None for tensors that its kernel does not cover, and the caller uses the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_int64, c_void_p
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import BITS_PER_BYTE, SummaryKind, projection, query_features
from vllm_gaudi_ucm.ops.block_selection.implementation import BlockSelectionImplementation, Prepared
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_CODED = {SummaryKind.HASH: 4, SummaryKind.CODES: 5}
LARGEST_HEAD = 576  # of summaries: the keys of latent attention are the longest
OUTSIDE = 2  # status: an id is outside of its tensor


class Scoring(ctypes.Structure):
    """`Scoring` of source/block_selection.h; tensors: query, summaries, blocks, spans, first_rows, num_rows, out."""

    _fields_ = (
        ("tensors", c_void_p * 7),
        ("sizes", c_int64 * 12),
        ("scale", c_float),
        ("first_more", c_float),
        ("rotation", c_void_p),
        ("turned", c_int64),
    )


class Choosing(ctypes.Structure):
    """`Choosing` of source/block_selection.h; sizes: candidates, spans, width, most."""

    _fields_ = (("scores", c_void_p), ("places", c_void_p), ("sizes", c_int64 * 4), ("out", c_void_p))


def covers(summaries: Tensor, kind: SummaryKind) -> bool:
    """True if kernels exist and can read these summaries."""
    return (
        native() is not None
        and summaries.is_cpu
        and summaries.is_contiguous()
        and (kind.is_coded or summaries.dtype in _TYPES)
        and summaries.shape[3] <= LARGEST_HEAD
    )


def readable(query: Tensor, kind: SummaryKind) -> Tensor:
    """The query features in the form that the kernels read: fp32 with dense heads; for sign codes the query, which the
    kernels turn.
    """
    features = query.float() if kind.is_coded else query_features(query, kind)
    return features if features.stride(2) == 1 else features.contiguous()


def layer_sizes(query: Tensor, summaries: Tensor, candidates: int, spans: int, kind: SummaryKind) -> tuple[int, ...]:
    """`Scoring.sizes`."""
    num_blocks, vectors, kv_heads, width = summaries.shape
    rows, heads, _ = query.shape
    strides = query.stride(0), query.stride(1)
    dim, code = ((width - 1) * BITS_PER_BYTE, _CODED[kind]) if kind.is_coded else (width, _TYPES[summaries.dtype])
    of_layer = rows, heads, kv_heads, dim, vectors, code, num_blocks
    return (*strides, *of_layer, candidates, spans, int(kind is SummaryKind.MINMAX))


def _weigh(scoring: Scoring, query: Tensor, kind: SummaryKind, scale: float) -> None:
    """Sets the numbers of a layer with which products become estimates."""
    scoring.scale, scoring.first_more = scale, log(kind.first_weight)
    scoring.rotation = projection(query.shape[2], query.device).data_ptr() if kind.is_coded else None
    scoring.turned = query.shape[2]


def scores(
    query: Tensor,
    summaries: Tensor,
    blocks: Tensor,
    spans: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    scale: float,
    kind: SummaryKind,
) -> Tensor | None:
    """Like `scores` of the reference; None for summaries that are not dense.

    Raises IndexError for a block, span or row outside its tensor.
    """
    library = native()
    if library is None or not covers(summaries, kind):
        return None
    query, out = readable(query, kind), torch.empty(blocks.shape, dtype=torch.float32)
    # kept here: a temporary copy must outlive the call
    tensors = [query, summaries, *(ids.contiguous() for ids in (blocks, spans, first_rows, num_rows)), out]
    sizes = layer_sizes(query, summaries, len(blocks), len(first_rows), kind)
    pointers = (c_void_p * 7)(*(tensor.data_ptr() for tensor in tensors))
    task = Scoring(pointers, (c_int64 * 12)(*sizes))
    _weigh(task, query, kind, scale)
    if library.ucm_block_scores(ctypes.byref(task)) == OUTSIDE:
        raise IndexError(
            f"block_scores: a block, a span or a row is outside of {summaries.shape[0]} blocks, {len(first_rows)} "
            f"spans or {query.shape[0]} rows"
        )
    return out


def choose(scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor | None:
    """Like `choose` of the reference; None without kernels. Raises IndexError for a place outside the table."""
    library = native()
    if library is None or not scores.is_cpu:
        return None
    scores, places = scores.float().contiguous(), places.contiguous()
    out = torch.empty((num_spans, most), dtype=torch.int64)
    sizes = (c_int64 * 4)(len(places), num_spans, width, most)
    task = Choosing(scores.data_ptr(), places.data_ptr(), sizes, out.data_ptr())
    if library.ucm_choose_blocks(ctypes.byref(task)) == OUTSIDE:
        raise IndexError(
            f"choose_blocks: a place is outside of 0 to {num_spans * width}, of {num_spans} x {width} blocks"
        )
    return out


class NativeBlockSelection(BlockSelectionImplementation):
    """Block selection by C++ kernels, on CPUs where they can be built."""

    devices = frozenset({"cpu"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return super().unavailable(device) or why_not_native() or None

    def scores(
        self,
        query: Tensor,
        summaries: Tensor,
        blocks: Tensor,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        scale: float,
        kind: SummaryKind,
        prepared: Prepared | None = None,
    ) -> Tensor | None:
        return scores(query, summaries, blocks, spans, first_rows, num_rows, scale, kind)

    def choose(
        self,
        scores: Tensor,
        places: Tensor,
        num_spans: int,
        width: int,
        most: int,
        prepared: Prepared | None = None,
    ) -> Tensor | None:
        return choose(scores, places, num_spans, width, most)


class StepCandidates(NamedTuple):
    """The candidates of a step, the same in all layers; int64 tensors on the CPU.

    blocks, spans, places: [candidates] physical block, request, and span * width + logical number; pads have the place
        spans * width.
    first_rows, num_rows, modes, counts, thresholds, slots: [spans]; modes as in `keep_or_replace`.
    choice_places, choice_spans, choice_hi: [selected] span * most + rank, span, and nonzero if the entry is seen.
    table: [spans * width + 1] physical block of each place.
    """

    blocks: Tensor
    spans: Tensor
    places: Tensor
    first_rows: Tensor
    num_rows: Tensor
    modes: Tensor
    counts: Tensor
    thresholds: Tensor
    slots: Tensor
    choice_places: Tensor
    choice_spans: Tensor
    choice_hi: Tensor
    table: Tensor
    width: int
    most: int


class _Selecting(ctypes.Structure):
    """`Selecting` of source/block_selection.h."""

    _fields_ = (
        ("scoring", Scoring),
        ("choosing", Choosing),
        ("step", c_void_p * 8),  # modes, counts, thresholds, slots, choice_places, choice_spans, choice_hi, table
        ("stored", c_void_p),
        ("checks", c_void_p),
        ("recall", c_void_p),
        ("chosen", c_void_p),
        ("num_slots", c_int64),
        ("selected", c_int64),
    )


class NativeSelection:
    """Block selection of the layers of a step, one after the other: they share the memory for results.

    Args:
        candidates: the candidates of the step. A later step of the same shapes may overwrite the contents of the
            tensors.
        chosen: int64, at least as long as the selection: `choose` writes the blocks there. None: the object allocates
            memory.
    """

    def __init__(self, candidates: StepCandidates, chosen: Tensor | None = None) -> None:
        c = StepCandidates._make(item.contiguous() if isinstance(item, Tensor) else item for item in candidates)
        self._candidates = c
        self._layer: tuple[object, ...] | None = None
        spans, selected = len(c.first_rows), len(c.choice_spans)
        if len(c.table) < spans * c.width:
            raise ValueError(f"block table has {len(c.table)} places, expected {spans} x {c.width} and a pad")
        self._scores = torch.zeros(len(c.blocks), dtype=torch.float32)
        self._ranking = torch.full((spans, c.most), -1, dtype=torch.int64)
        self._chosen = torch.zeros(selected, dtype=torch.int64) if chosen is None else chosen[:selected]
        task = self._task = _Selecting(num_slots=0, selected=selected)
        ids = [tensor.data_ptr() for tensor in (c.blocks, c.spans, c.first_rows, c.num_rows)]
        task.scoring.tensors = (c_void_p * 7)(None, None, *ids, self._scores.data_ptr())
        sizes = (c_int64 * 4)(len(c.places), spans, c.width, c.most)
        task.choosing = Choosing(self._scores.data_ptr(), c.places.data_ptr(), sizes, self._ranking.data_ptr())
        step = c.modes, c.counts, c.thresholds, c.slots, c.choice_places, c.choice_spans, c.choice_hi, c.table
        task.step = (c_void_p * 8)(*(tensor.data_ptr() for tensor in step))
        task.chosen = self._chosen.data_ptr()

    def choose(
        self,
        query: Tensor,
        summaries: Tensor,
        stored: Tensor,
        scale: float,
        kind: SummaryKind,
        checks: Tensor,
        recall: Tensor | None = None,
    ) -> Tensor | None:
        """Returns the physical blocks that a layer attends to: int64 [selected], valid until the next call; None if not
            covered.

        query: [rows, heads, dim]. summaries: [num_blocks, vectors, kv_heads, width].
        stored: int64 [slots, most], dense: rankings of the layer, used or replaced according to the modes.
        checks: int64 [2]: the numbers of rankings that checks kept and replaced are added.
        recall: float64 [2]: the estimated mass of the chosen and of all candidates is added; None skips this.
        Raises IndexError for an id outside its tensor.
        """
        query, task, library = readable(query, kind), self._task, native()
        # most layers of a model are alike
        layer = (kind, summaries.dtype, *((t.shape, t.stride()) for t in (query, summaries, stored)))
        if layer != self._layer:
            if library is None or not covers(summaries, kind):
                return None
            self._check(stored)
            sizes = layer_sizes(query, summaries, len(self._scores), len(self._ranking), kind)
            task.scoring.sizes = (c_int64 * 12)(*sizes)
            self._layer = layer
        assert library is not None, "the layer before had one"
        task.scoring.tensors[0], task.scoring.tensors[1] = query.data_ptr(), summaries.data_ptr()
        _weigh(task.scoring, query, kind, scale)
        task.stored, task.num_slots, task.checks = stored.data_ptr(), stored.shape[0], checks.data_ptr()
        task.recall = None if recall is None else recall.data_ptr()
        if library.ucm_select_blocks(ctypes.byref(task)) == OUTSIDE:
            raise IndexError(
                f"block selection: a block, span, row, place or slot is outside of {summaries.shape[0]} blocks, "
                f"{len(self._ranking)} spans, {query.shape[0]} rows, {self._candidates.width} places per span "
                f"or {stored.shape[0]} slots"
            )
        return self._chosen

    @property
    def task(self) -> ctypes.Structure:
        """The arguments of the kernel; its layer-specific part is from the latest `choose`."""
        return self._task

    def _check(self, stored: Tensor) -> None:
        if stored.shape[1] != self._candidates.most or not stored.is_contiguous():
            raise ValueError(
                f"stored rankings are {tuple(stored.shape)}, expected dense [slots, {self._candidates.most}]"
            )


# The sizes of the step in `Scoring.sizes`; all other sizes belong to the layer.
_SIZES_OF_STEP = (9, 10)
_OF_LAYER = ("stored", "checks", "recall", "num_slots")
_OF_SCORING = ("scale", "first_more", "rotation", "turned")


class RecordedSelection:
    """Gives recorded calls of `NativeSelection.choose` the candidates of another step.

    The steps must leave the choice in the same memory, because attention reads it there.

    Args:
        kept: structures of recorded calls, including calls of other kernels.
    """

    def __init__(self, kept: Iterable[object]) -> None:
        self._tasks = [task for task in kept if isinstance(task, _Selecting)]
        self._layers = [
            (
                tuple(task.scoring.tensors[:2]),
                list(task.scoring.sizes),
                [getattr(task.scoring, name) for name in _OF_SCORING],
                [getattr(task, name) for name in _OF_LAYER],
            )
            for task in self._tasks
        ]

    def bind(self, selection: NativeSelection) -> None:
        """Points the recorded calls at `selection`, which must live as long as they run."""
        given = selection.task
        size, address = ctypes.sizeof(given), ctypes.addressof(given)
        counts = dict(zip(_SIZES_OF_STEP, given.choosing.sizes[:2], strict=True))
        for task, (tensors, sizes, weights, others) in zip(self._tasks, self._layers, strict=True):
            ctypes.memmove(ctypes.addressof(task), address, size)
            task.scoring.tensors[0], task.scoring.tensors[1] = tensors
            for place, count in counts.items():
                sizes[place] = count
            task.scoring.sizes[:] = sizes
            for name, value in zip(_OF_SCORING, weights, strict=True):
                setattr(task.scoring, name, value)
            for name, value in zip(_OF_LAYER, others, strict=True):
                setattr(task, name, value)
