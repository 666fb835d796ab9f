"""Block selection of one layer: validates the tensors, asks for the implementation and calls it.

The way of a layer: `write_summaries` of the blocks that have become full, `block_scores` of the candidates for the
current query, `choose_blocks` by these scores, `keep_or_replace` against the stored choice. All of it may be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind, projection
from vllm_gaudi_ucm.ops.block_selection.impl import reference
from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION
from vllm_gaudi_ucm.ops.registry import AUTO

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def new_summaries(key_cache: Tensor, kind: SummaryKind) -> Tensor:
    """Zeros [blocks, vectors, kv_heads, width] for a key cache [blocks, block_size, kv_heads, dim], on its device.

    Floats are kept in the dtype of the keys. Call it before anything is captured: it also makes what `hash` needs on
    the device.
    """
    if kind is SummaryKind.HASH:
        projection(key_cache.shape[-1], key_cache.device)
    dtype = kind.dtype if kind is SummaryKind.HASH else key_cache.dtype
    return key_cache.new_zeros(kind.shape(*key_cache.shape), dtype=dtype)


def write_summaries(key_cache: Tensor, blocks: Tensor, summaries: Tensor, kind: SummaryKind) -> None:
    """Writes the summaries of blocks that are full of certain tokens, in place.

    key_cache: [num_blocks, block_size, kv_heads, dim], may be a strided view.
    blocks: int64 [n] physical block ids. Pads are the dummy block 0; they may repeat, and what lands there is not
        used.
    summaries: [num_blocks, vectors, kv_heads, width] as `new_summaries` makes them; any float dtype, uint8 for `hash`.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check("write_summaries", "key_cache", key_cache, (None, None, None, None), _FLOATS, key_cache.device)
        _check("write_summaries", "blocks", blocks, (None,), (torch.int64,), key_cache.device)
        _check("write_summaries", "summaries", summaries, kind.shape(*key_cache.shape), _dtypes(kind), key_cache.device)
    reference.write(key_cache, blocks, summaries, kind)


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
) -> Tensor:
    """fp32 [candidates] in 0 to 1: the share of its span's attention that each block is estimated to get.

    A softmax of the estimated scores over the blocks of a span, for each row and query head, averaged over these.
    Blocks that are attended anyway may be given, too: they take their share of the softmax, as in attention.

    query: [rows, heads, dim], rows > 0; head h uses kv head h // (heads / kv_heads).
    summaries: [num_blocks, vectors, kv_heads, width].
    blocks, spans: int64 [candidates] physical block id and span. Pads: block 0 and a span with num_rows 0; score 0.
    first_rows, num_rows: int64 [spans], rows `first_rows[i]` to `first_rows[i] + num_rows[i]` of the query.
    max_rows: host-side, no span has more rows.
    A block whose estimate is not finite has score 1 and takes no part in the softmax of the others.
    implementation: a name in `BLOCK_SELECTION`, or `auto` for the fastest that can be used: `native` on a CPU, `cuda`
        (Triton) on a GPU. What these do not cover the reference computes.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, kind)
        chosen = BLOCK_SELECTION.choose(implementation, query.device.type)
        found = chosen.scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, scale, kind)
        if found is not None:
            return found
    return reference.scores(query, summaries, blocks, spans, first_rows, num_rows, max_rows, scale, kind)


def choose_blocks(
    scores: Tensor, places: Tensor, num_spans: int, width: int, most: int, *, implementation: str = AUTO
) -> Tensor:
    """int64 [num_spans, most]: logical block numbers by descending score, equal ones by number; then -1.

    scores: floats [candidates]. A NaN comes first, so a broken candidate is not overlooked.
    places: int64 [candidates], span * width + logical block number for a candidate that may be chosen, each at most
        once, and num_spans * width for one that may not. There may be fewer of a span than `most`.
    implementation: as of `block_scores`.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check("choose_blocks", "scores", scores, (None,), _FLOATS, scores.device)
        _check("choose_blocks", "places", places, tuple(scores.shape), (torch.int64,), scores.device)
        if min(num_spans, width, most) < 0:
            raise ValueError(f"choose_blocks: {num_spans=}, {width=}, {most=}, expected none below 0")
        chosen = BLOCK_SELECTION.choose(implementation, scores.device.type)
        found = chosen.choose(scores, places, num_spans, width, most)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """What each span attends to from now on: (chosen int64 [spans, most], kept bool [spans], replaced bool [spans]).

    stored, fresh: int64 [spans, most] rankings as of `choose_blocks`; entries outside of [0, width) are none.
    counts: int64 [spans], how many of a ranking are attended.
    modes: int64 [spans]. 0: the fresh one. 1: the stored one. 2 (check): the stored one if the first `counts` of both,
        as sets, differ in at most `thresholds` blocks (added + removed) and it has that many; kept and replaced tell
        which it was and are False in other modes.
    Source: KVStar's checkpoint (seed 002, 3.1), with the threshold configurable and on the top-k part only.
    implementation: as of `block_scores`.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        operation = "keep_or_replace"
        _check(operation, "stored", stored, (None, None), (torch.int64,), stored.device)
        _check(operation, "fresh", fresh, tuple(stored.shape), (torch.int64,), stored.device)
        for name, tensor in (("counts", counts), ("modes", modes), ("thresholds", thresholds)):
            _check(operation, name, tensor, (stored.shape[0],), (torch.int64,), stored.device)
        chosen = BLOCK_SELECTION.choose(implementation, stored.device.type)
        found = chosen.keep_or_replace(stored, fresh, counts, modes, thresholds, width)
        if found is not None:
            return found
    return reference.keep_or_replace(stored, fresh, counts, modes, thresholds, width)


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
    return (torch.uint8,) if kind is SummaryKind.HASH else _FLOATS


def _check(
    operation: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """None in the expected shape fits any size."""
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(want in (None, size) for size, want in zip(found, shape, strict=True))
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{operation}: {name} is {tensor.dtype} {found} on {tensor.device}, "
            f"expected {' or '.join(map(str, dtypes))} ({wanted}) on {device}"
        )
