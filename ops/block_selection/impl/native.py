"""Block selection on CPU in C++ (ops/native/source/block_scores.cpp, block_choice.cpp): one call per operation.

Why: in torch a layer's choice took longer than the attention that it saves. What the kernels do not cover is answered
None, and the caller asks the reference.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.summary_kind import SummaryKind
from vllm_gaudi_ucm.ops.native.library import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST_HEAD = 512  # of summaries in half precision, which are converted in a buffer of this size
_OUTSIDE = 2


class _Scoring(ctypes.Structure):
    """`Scoring` of source/block_scores.cpp."""

    _fields_ = (
        ("tensors", c_void_p * 7),  # query, summaries, blocks, spans, first_rows, num_rows, out
        ("sizes", c_int64 * 12),
        ("scale", c_float),
    )


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
    if library is None or kind is SummaryKind.HASH or not summaries.is_contiguous() or summaries.dtype not in _TYPES:
        return None
    num_blocks, vectors, kv_heads, dim = summaries.shape
    if dim > LARGEST_HEAD:
        return None
    query = query.float()
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty(blocks.shape, dtype=torch.float32)
    # kept here: a temporary copy must outlive the call
    tensors = [query, summaries, *(ids.contiguous() for ids in (blocks, spans, first_rows, num_rows)), out]
    rows, heads, _ = query.shape
    task = _Scoring(
        (c_void_p * 7)(*(tensor.data_ptr() for tensor in tensors)),
        (c_int64 * 12)(
            *(query.stride(0), query.stride(1), rows, heads, kv_heads, dim, vectors, _TYPES[summaries.dtype]),
            *(num_blocks, len(blocks), len(first_rows), kind is SummaryKind.MINMAX),
        ),
        scale,
    )
    if library.ucm_block_scores(ctypes.byref(task)) == _OUTSIDE:
        raise IndexError(
            f"block_scores: a block, a span or a row is outside of {num_blocks} blocks, {len(first_rows)} spans "
            f"or {rows} rows"
        )
    return out


def choose(scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor | None:
    """The reference's `choose`; None without kernels. Raises IndexError for a place outside of the table."""
    library = native()
    if library is None:
        return None
    scores, places = scores.float().contiguous(), places.contiguous()
    out = torch.empty((num_spans, most), dtype=torch.int64)
    addresses = scores.data_ptr(), places.data_ptr()
    if library.ucm_choose_blocks(*addresses, len(places), num_spans, width, most, out.data_ptr()) == _OUTSIDE:
        raise IndexError(
            f"choose_blocks: a place is outside of 0 to {num_spans * width}, of {num_spans} x {width} blocks"
        )
    return out
