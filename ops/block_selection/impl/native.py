"""Block selection on CPU in C++ (ops/native/source/block_scores.cpp, block_choice.cpp): one call per operation.

What the kernels do not cover is answered None, and the caller asks the reference.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, query_features
from vllm_gaudi_ucm.ops.block_selection.summary_kind import SummaryKind
from vllm_gaudi_ucm.ops.native.library import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST_HEAD = 512  # of summaries in half precision, which are converted in a buffer of this size
OUTSIDE = 2  # status: an id is outside of its tensor


class Scoring(ctypes.Structure):
    """`Scoring` of source/block_selection.h; tensors: query, summaries, blocks, spans, first_rows, num_rows, out."""

    _fields_ = (("tensors", c_void_p * 7), ("sizes", c_int64 * 12), ("scale", c_float), ("first_more", c_float))


class Choosing(ctypes.Structure):
    """`Choosing` of source/block_selection.h; sizes: candidates, spans, width, most."""

    _fields_ = (("scores", c_void_p), ("places", c_void_p), ("sizes", c_int64 * 4), ("out", c_void_p))


def covers(summaries: Tensor, kind: SummaryKind) -> bool:
    """Whether there are kernels, and they can read these summaries."""
    return (
        native() is not None
        and kind is not SummaryKind.HASH
        and summaries.is_cpu
        and summaries.is_contiguous()
        and summaries.dtype in _TYPES
        and summaries.shape[3] <= LARGEST_HEAD
    )


def readable(query: Tensor, kind: SummaryKind) -> Tensor:
    """The features of the query as the kernels read them: fp32 with dense heads."""
    features = query_features(query, kind)
    return features if features.stride(2) == 1 else features.contiguous()


def layer_sizes(query: Tensor, summaries: Tensor, candidates: int, spans: int, kind: SummaryKind) -> tuple[int, ...]:
    """`Scoring.sizes`."""
    num_blocks, vectors, kv_heads, dim = summaries.shape
    rows, heads, _ = query.shape
    strides = query.stride(0), query.stride(1)
    of_layer = rows, heads, kv_heads, dim, vectors, _TYPES[summaries.dtype], num_blocks
    return (*strides, *of_layer, candidates, spans, int(kind is SummaryKind.MINMAX))


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
    """The reference's `scores`; None for `hash`, and for summaries that are not dense.

    Raises IndexError for a block, span or row outside of its tensor.
    """
    library = native()
    if library is None or not covers(summaries, kind):
        return None
    query, out = readable(query, kind), torch.empty(blocks.shape, dtype=torch.float32)
    # kept here: a temporary copy must outlive the call
    tensors = [query, summaries, *(ids.contiguous() for ids in (blocks, spans, first_rows, num_rows)), out]
    sizes = layer_sizes(query, summaries, len(blocks), len(first_rows), kind)
    task = Scoring(
        (c_void_p * 7)(*(tensor.data_ptr() for tensor in tensors)), (c_int64 * 12)(*sizes), scale, log(REST_WEIGHT)
    )
    if library.ucm_block_scores(ctypes.byref(task)) == OUTSIDE:
        raise IndexError(
            f"block_scores: a block, a span or a row is outside of {summaries.shape[0]} blocks, {len(first_rows)} "
            f"spans or {query.shape[0]} rows"
        )
    return out


def choose(scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor | None:
    """The reference's `choose`; None without kernels. Raises IndexError for a place outside of the table."""
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
