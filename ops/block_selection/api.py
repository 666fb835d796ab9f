"""Block selection of one layer: validates the tensors, chooses the implementation and calls it.

A layer calls, in this order: `write_summaries` for blocks that have just become full, `block_scores` of the candidates
for the current query, `choose_blocks` by score, and `keep_or_replace` to compare the result with the stored ranking.
All of them may run inside a captured graph.
"""

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind, code_tables, projection
from vllm_gaudi_ucm.ops.block_selection.impl import reference
from vllm_gaudi_ucm.ops.block_selection.implementation import (
    BLOCK_SELECTION,
    BlockSelectionImplementation,
    ChoosingSpans,
    Prepared,
)
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.selected_list import SelectedList

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CACHED = (*_FLOATS, E4M3)


def new_summaries(key_cache: Tensor, kind: SummaryKind, *, narrow: bool = False) -> Tensor:
    """Zeros [blocks, vectors, kv_heads, width] for a key cache [blocks, block_size, kv_heads, dim], on its device.

    Float summaries have the dtype of the keys, or are 8-bit floats (`narrow`; ignored by sign codes). Call it before
    any capture: it also creates the projection and the tables of sign codes on the device.
    """
    if kind.is_coded:
        projection(key_cache.shape[-1], key_cache.device)
        code_tables(key_cache.device)
    dtype = kind.dtype if kind.is_coded else E4M3 if narrow else key_cache.dtype
    return key_cache.new_zeros(kind.shape(*key_cache.shape), dtype=dtype)


def write_summaries(
    key_cache: Tensor, blocks: Tensor, summaries: Tensor, kind: SummaryKind, *, implementation: str = AUTO
) -> None:
    """Writes the summaries of full blocks, in place. A full block never holds a draft that may still be rejected.

    key_cache: [num_blocks, block_size, kv_heads, dim]; may be a strided view. Summaries are in units of the cache: the
        query that scores them is multiplied by the scale of the keys, if the keys have one.
    blocks: int64 [n] physical block ids. Pads are the dummy block 0; they may repeat, and its summary is never used.
    summaries: [num_blocks, vectors, kv_heads, width] from `new_summaries`; floats, uint8 for sign codes. 8-bit floats
        are rounded once; values beyond their range are clamped to it.
    implementation: as in `block_scores`.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check("write_summaries", "key_cache", key_cache, (None, None, None, None), _CACHED, key_cache.device)
        _check("write_summaries", "blocks", blocks, (None,), (torch.int64,), key_cache.device)
        _check("write_summaries", "summaries", summaries, kind.shape(*key_cache.shape), _dtypes(kind), key_cache.device)
    if not _choose(implementation, key_cache.device.type).write(key_cache, blocks, summaries, kind):
        reference.write(key_cache, blocks, summaries, kind)


def prepare_spans(
    spans: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    max_rows: int,
    counts: Tensor,
    modes: Tensor,
    most: int,
    *,
    implementation: str = AUTO,
) -> Prepared | None:
    """Computes once what each layer of a step would compute again: for `block_scores`, `choose_blocks` and
    `keep_or_replace` with the same arguments and implementation. Returns None if that implementation has nothing to
    compute in advance.
    """
    chosen = _choose(implementation, spans.device.type)
    return chosen.prepare(spans, first_rows, num_rows, max_rows, counts, modes, most)


def passes_over(device_type: str, *, implementation: str = AUTO) -> bool:
    """True if `block_scores` and a choice by it cost next to nothing for spans whose `num_rows` is 0."""
    return _choose(implementation, device_type).passes_over


def block_scores(
    query: Tensor,
    summaries: Tensor,
    blocks: Tensor,
    spans: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    max_rows: int,
    scale: float,
    kind: SummaryKind,
    *,
    implementation: str = AUTO,
    prepared: Prepared | None = None,
) -> Tensor:
    """The estimated share of each candidate block in the attention of its span: fp32 [candidates], from 0 to 1.

    A softmax of the estimated scores over the blocks of a span, separately for each row and query head, then averaged
    over rows and heads. The candidates may include blocks that are attended anyway: they take their share of the
    softmax, as in attention. A block with an estimate that is not finite gets score 1, and the softmax of the others
    leaves it out.

    query: [rows, heads, dim], rows > 0; head h uses KV head h // (heads / kv_heads).
    summaries: [num_blocks, vectors, kv_heads, width].
    blocks, spans: int64 [candidates] physical block id and span. A pad is block 0 with a span whose num_rows is 0; it
        scores 0.
    first_rows, num_rows: int64 [spans]; span i has the rows from `first_rows[i]` to `first_rows[i] + num_rows[i]`.
    max_rows: the most rows of any span, known on the host.
    implementation: a name in `BLOCK_SELECTION`, or `auto` for the fastest available one: `native` on a CPU, `cuda`
        (Triton) on a GPU, `hpu` on Gaudi, which breaks ties in any order. The reference computes what these do not
        cover.
    prepared: the result of `prepare_spans`.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, kind)
    chosen = _choose(implementation, query.device.type)
    found = chosen.scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, scale, kind, prepared)
    if found is not None:
        return found
    return reference.scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, scale, kind)


def choose_blocks(
    scores: Tensor,
    places: Tensor,
    num_spans: int,
    width: int,
    most: int,
    *,
    implementation: str = AUTO,
    prepared: Prepared | None = None,
) -> Tensor:
    """Returns the best blocks of each span: int64 [num_spans, most] logical block numbers, padded with -1.

    Blocks are sorted by descending score; ties are broken by block number. A NaN comes first, so that a broken
    candidate is not overlooked.

    scores: floats [candidates].
    places: int64 [candidates]: span * width + logical block number, each at most once, or num_spans * width for a
        candidate that must not be chosen. A span may have fewer candidates than `most`.
    implementation, prepared: as in `block_scores`; `prepared` must be for candidates of the spans that `places` names.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check("choose_blocks", "scores", scores, (None,), _FLOATS, scores.device)
        _check("choose_blocks", "places", places, tuple(scores.shape), (torch.int64,), scores.device)
        if min(num_spans, width, most) < 0:
            raise ValueError(f"choose_blocks: {num_spans=}, {width=}, {most=}, expected none below 0")
    found = _choose(implementation, scores.device.type).choose(scores, places, num_spans, width, most, prepared)
    if found is not None:
        return found
    return reference.choose(scores, places, num_spans, width, most)


def keep_or_replace(
    stored: Tensor,
    fresh: Tensor,
    counts: Tensor,
    modes: Tensor,
    thresholds: Tensor,
    width: int,
    *,
    implementation: str = AUTO,
    prepared: Prepared | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the new ranking of each span: (chosen int64 [spans, most], kept bool [spans], replaced bool [spans]).

    stored, fresh: int64 [spans, most] rankings from `choose_blocks`; entries outside [0, width) are empty.
    counts: int64 [spans]: how many blocks of a ranking are attended.
    modes: int64 [spans]. 0 takes the fresh ranking, 1 the stored one. 2 checks: it keeps the stored ranking if that has
        `counts` blocks, and if the first `counts` blocks of the two, as sets, differ in at most `thresholds` blocks
        (added + removed). `kept` and `replaced` give the outcome of a check, and are False in the other modes.
    thresholds: int64 [spans].
    width: logical block numbers are below it.
    implementation, prepared: as in `block_scores`.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    Source: KVStar's checkpoint (seed 002, 3.1), with a configurable threshold, for the top-k part only.
    """
    if not torch.compiler.is_compiling():
        operation = "keep_or_replace"
        _check(operation, "stored", stored, (None, None), (torch.int64,), stored.device)
        _check(operation, "fresh", fresh, tuple(stored.shape), (torch.int64,), stored.device)
        for name, tensor in (("counts", counts), ("modes", modes), ("thresholds", thresholds)):
            _check(operation, name, tensor, (stored.shape[0],), (torch.int64,), stored.device)
    chosen = _choose(implementation, stored.device.type)
    found = chosen.keep_or_replace(stored, fresh, counts, modes, thresholds, width, prepared)
    if found is not None:
        return found
    return reference.keep_or_replace(stored, fresh, counts, modes, thresholds, width)


def hands_over(most: int, device_type: str, *, implementation: str = AUTO) -> bool:
    """True if `take_choice` is to be called instead of `keep_or_replace`. most: ranks of a choice."""
    return _choose(implementation, device_type).hands_over(most)


def take_choice(fresh: Tensor, spans: ChoosingSpans, *, implementation: str = AUTO) -> tuple[Tensor, Tensor]:
    """Does `keep_or_replace` on the table of stored rankings, and returns the blocks that attention reads.

    Returns the new rankings, int64 [spans, most], also written to the table, and int64 [selected] physical blocks: the
    first `counts` of each span's ranking, span after span, then 0. Only for implementations for which `hands_over` is
    true.

    fresh: int64 [spans, most] contiguous, from `choose_blocks`.
    Raises ValueError if shapes, dtypes or devices do not match.
    """
    operation, device = "take_choice", fresh.device
    _check(operation, "fresh", fresh, (None, None), (torch.int64,), device)
    _check(operation, "stored", spans.stored, (None, fresh.shape[1]), (torch.int64,), device)
    _check(operation, "counts", spans.counts, fresh.shape[:1], (torch.int64,), device)
    if not fresh.is_contiguous():
        raise ValueError(f"{operation}: fresh has strides {fresh.stride()}, expected a contiguous tensor")
    _check_taken(operation, spans)
    return _choose(implementation, device.type).take_choice(fresh, spans)


def ranks_and_takes(most: int, device_type: str, *, implementation: str = AUTO) -> bool:
    """True if `rank_and_take` is to be called instead of `choose_blocks` and `take_choice`. most: ranks of a choice."""
    chosen = _choose(implementation, device_type)
    return chosen.ranks_and_takes and chosen.hands_over(most)


def rank_and_take(
    scores: Tensor,
    places: Tensor,
    spans: ChoosingSpans,
    *,
    implementation: str = AUTO,
    prepared: Prepared | None = None,
    target: SelectedList | None = None,
) -> tuple[Tensor, Tensor]:
    """`choose_blocks` and `take_choice` in one call: the new rankings, and the blocks that attention reads.

    scores, places: as in `choose_blocks`. spans: as in `take_choice`.
    prepared: the result of `prepare_spans` for the same implementation.
    target: the blocks are also written there. If the implementation did so, the returned blocks are a view of it.
    Raises ValueError if shapes, dtypes or devices do not match.
    """
    operation, device = "rank_and_take", scores.device
    _check(operation, "scores", scores, (None,), _FLOATS, device)
    _check(operation, "places", places, tuple(scores.shape), (torch.int64,), device)
    _check(operation, "stored", spans.stored, (None, None), (torch.int64,), device)
    _check_taken(operation, spans)
    if target is not None:
        _check(operation, "target.blocks", target.blocks, (None,), (torch.int64,), device)
        _check(operation, "target.places", target.places, (spans.selected,), (torch.int64,), device)
    return _choose(implementation, device.type).rank_and_take(scores, places, spans, prepared, target)


def _check_taken(operation: str, taken: ChoosingSpans) -> None:
    """Checks the tensors of spans that `take_choice` and `rank_and_take` read and write."""
    device, spans = taken.stored.device, taken.counts.shape[0]
    of_spans = {name: getattr(taken, name) for name in ("slots", "counts", "modes", "thresholds")}
    for name, tensor in of_spans.items():
        _check(operation, name, tensor, (spans,), (torch.int64,), device)
    _check(operation, "block_table", taken.block_table, (spans * taken.width + 1,), (torch.int64,), device)
    _check(operation, "checks", taken.checks, (2,), (torch.int64,), device)
    for name, tensor in {"stored": taken.stored, **of_spans, "block_table": taken.block_table}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{operation}: {name} has strides {tensor.stride()}, expected a contiguous tensor")


def chosen_implementation(device_type: str, implementation: str = AUTO) -> str:
    """Returns the name of the implementation for a device, with `auto` resolved. Traced code cannot ask the
    registry, so compiled code is given this name.
    """
    return BLOCK_SELECTION.choose(implementation, device_type).name


# torch.compile cannot trace the choice. Code compiled for a Gaudi is traced for a Gaudi only.
_TRACED = {name: BLOCK_SELECTION.make(name) for name in ("reference", "hpu") if name in BLOCK_SELECTION}


def _choose(implementation: str, device_type: str) -> BlockSelectionImplementation:
    if not torch.compiler.is_compiling():
        return BLOCK_SELECTION.choose(implementation, device_type)
    return _TRACED.get(device_type if implementation == AUTO else implementation, _TRACED["reference"])


def _check_scores(
    query: Tensor,
    summaries: Tensor,
    blocks: Tensor,
    spans: Tensor,
    first_rows: Tensor,
    num_rows: Tensor,
    max_rows: int,
    kind: SummaryKind,
) -> None:
    operation, device, integers = "block_scores", query.device, (torch.int64,)
    _check(operation, "query", query, (None, None, None), _FLOATS, device)
    rows, heads, dim = query.shape
    _check(operation, "summaries", summaries, (None, None, None, kind.width(dim)), _dtypes(kind), device)
    if kind is SummaryKind.MINMAX and summaries.shape[1] != 2:
        raise ValueError(f"block_scores: summaries have {summaries.shape[1]} vectors, expected 2 for {kind}")
    kv_heads = summaries.shape[2]
    if rows == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"block_scores: query has {rows} rows of {heads} heads, "
            f"expected at least one row and a multiple of the {kv_heads} kv heads"
        )
    _check(operation, "blocks", blocks, (None,), integers, device)
    _check(operation, "spans", spans, tuple(blocks.shape), integers, device)
    _check(operation, "first_rows", first_rows, (None,), integers, device)
    _check(operation, "num_rows", num_rows, tuple(first_rows.shape), integers, device)
    if max_rows < 1:
        raise ValueError(f"block_scores: max_rows is {max_rows}, expected at least 1")


def _dtypes(kind: SummaryKind) -> tuple[torch.dtype, ...]:
    return (torch.uint8,) if kind.is_coded else _CACHED


def _check(
    operation: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises ValueError if the tensor does not match; None in the expected shape allows any size."""
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(want in (None, size) for size, want in zip(found, shape, strict=True))
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{operation}: {name} is {tensor.dtype} {found} on {tensor.device}, "
            f"expected {' or '.join(map(str, dtypes))} ({wanted}) on {device}"
        )
