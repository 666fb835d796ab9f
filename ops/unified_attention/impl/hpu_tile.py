"""Attention of one tile as two batched matrix products with a softmax between them, in what Gaudi has operators for.

bfloat16 is multiplied as it is (the matrix engine adds up in float32), anything else in float32; maxima and sums are
float32 always. Garbage is kept out as in the reference: hidden scores are replaced, and so are values that would be
multiplied with a weight of 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.parts import NEG_INF, Partial, shift

# The matrix engine works on 128 x 128.
TILE = 128
# float32 scores of one tile; softmax has a few tensors of that size at a time.
SCORE_BYTES = 8 << 20
# Keys and values of one tile as they lie in the cache; they are there once more as gathered, or put in order.
KV_BYTES = 16 << 20
# Keys and values of slices that lie side by side: they stay while all rows of the slices are computed.
SLICE_BYTES = 8 << 20
# float32 results of blocks that wait for their reduction to rows.
PIECE_BYTES = 16 << 20
# Rows that read a tile of shared blocks together, and rows of a causal tile at most.
MOST_ROWS = 512


def score_tokens(heads: int, rows: int) -> int:
    """Tokens that so many rows are multiplied with at a time, a multiple of TILE."""
    return max(TILE, SCORE_BYTES // (4 * heads * max(1, rows)) // TILE * TILE)


def kv_tokens(key: Tensor, value: Tensor) -> int:
    """Tokens of keys and values [..., kv_heads, dim] that are read at a time."""
    return max(1, KV_BYTES // _token_bytes(key, value))


def slice_tokens(key: Tensor, value: Tensor) -> int:
    """Tokens of all slices that lie side by side."""
    return max(1, SLICE_BYTES // _token_bytes(key, value))


def _token_bytes(key: Tensor, value: Tensor) -> int:
    return key.shape[-2] * (key.shape[-1] + value.shape[-1]) * key.element_size()


def block_tile(key_cache: Tensor, value_cache: Tensor, heads: int, rows: int = 1) -> int:
    """Blocks, each multiplied with `rows` rows of its own, that are computed at a time."""
    block_size = key_cache.shape[1]
    scores = SCORE_BYTES // (4 * heads * rows * block_size)
    return max(1, min(scores, kv_tokens(key_cache, value_cache) // block_size))


def piece_blocks(heads: int, value_dim: int, rows: int = 1) -> int:
    """Blocks whose results are reduced to rows at a time."""
    return max(1, PIECE_BYTES // (4 * heads * value_dim * rows))


def causal_rows(slice_rows: int, slice_keys: int) -> int:
    """Rows of a causal tile. The square at its end is half wasted, so it is an eighth of the keys or less, if it can.

    More rows read the keys less often.
    """
    rows = slice_keys // 8 // TILE * TILE
    return min(slice_rows, max(TILE, min(MOST_ROWS, rows)))


class Scaling(NamedTuple):
    """dtype: what the matrix engine multiplies."""

    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor, cache: Tensor, scale: float) -> Scaling:
        """float16 is not multiplied as it is: scores beyond 65504 are ordinary numbers."""
        both = query.dtype == cache.dtype == torch.bfloat16
        return cls(scale, torch.bfloat16 if both else torch.float32)

    def apply(self, query: Tensor) -> Tensor:
        """The rows of a tile times the scale: there are fewer of these than scores."""
        return (query.float() * self.scale).to(self.dtype)


def attend_tile(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, tokens: Tensor | None = None) -> Partial:
    """Partial of query [..., rows, heads, dim], which is scaled, over key and value [..., keys, kv_heads, dim].

    visible: bool [..., rows, keys].
    tokens: bool [..., keys], where all rows see the same keys or none; then the others' values are left out, and a
        broken value shows itself in the results of all rows.

    The sum of a row that sees a broken value is NaN, which makes all of its result NaN.

    Returns out in the dtype of the products; max and sum are float32.
    """
    kv_heads, dtype = key.shape[-2], query.dtype
    folded = query.unflatten(-2, (kv_heads, -1)).movedim(-3, -4)
    groups = folded.shape[-2]
    scores = folded.flatten(-3, -2) @ key.to(dtype).movedim(-2, -3).transpose(-1, -2)
    weights, top, total = _softmax(scores.unflatten(-2, (-1, groups)), ~visible[..., None, :, None, :])
    if tokens is not None:
        value = value.masked_fill(~tokens[..., None, None], 0)
    else:
        broken = ~value.isfinite().all(-1)
        value = value.nan_to_num(0.0, 0.0, 0.0)
        tainted = visible.to(dtype) @ broken.to(dtype) > 0
        total = total.masked_fill(tainted.transpose(-1, -2)[..., None], float("nan"))
    out = weights.to(dtype).flatten(-3, -2) @ value.to(dtype).movedim(-2, -3)
    out = out.unflatten(-2, (-1, groups))
    if tokens is not None:
        total = total.masked_fill(~out.isfinite().all(-1), float("nan"))
    return Partial(_rows_first(out, -4), _rows_first(top, -3), _rows_first(total, -3))


def accumulate(sums: Partial | None, piece: Partial) -> Partial:
    """Partial over the keys of both. `sums` is overwritten: one tensor less of what must stay on the chip."""
    if sums is None:
        return piece._replace(out=piece.out.float())
    top = torch.maximum(sums.max, piece.max)
    before, now = torch.exp(sums.max - shift(top)), torch.exp(piece.max - shift(top))
    out = sums.out.mul_(before[..., None]).addcmul_(piece.out.float(), now[..., None])
    return Partial(out, top, sums.sum * before + piece.sum * now)


def _softmax(scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum), and float32 maxima and sums over the last dimension; -inf and 0 where all is hidden.

    Overwrites the scores, which nobody else has.
    """
    scores = scores.masked_fill_(hidden, NEG_INF)
    if scores.dtype == torch.bfloat16 and hpu_kernels.SOFTMAX_FA2 is not None:
        return hpu_kernels.fused_softmax(scores, hpu_kernels.SOFTMAX_FA2)
    wide = scores.float()
    top = wide.amax(-1)
    weights = wide.sub_(shift(top)[..., None]).exp_()
    return weights, top, weights.sum(-1)


def _rows_first(tensor: Tensor, heads: int) -> Tensor:
    """[..., kv_heads, rows, groups, ...] as [..., rows, heads, ...]; `heads`: where the kv heads are."""
    return tensor.movedim(heads, heads + 1).flatten(heads + 1, heads + 2)
