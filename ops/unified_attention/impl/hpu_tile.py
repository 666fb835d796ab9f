"""Attention of one tile as two batched matrix products with a softmax between them, in what Gaudi has operators for.

bfloat16 is multiplied as it is (the matrix engine adds up in float32), anything else in float32; maxima and sums are
float32 always. Garbage is kept out as in the reference: hidden scores are replaced, and so are values that would be
multiplied with a weight of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl import hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.partial import NEG_INF, shift
from vllm_gaudi_ucm.ops.unified_attention.parts import Partial


def product_dtype(query: Tensor, cache: Tensor) -> torch.dtype:
    """What the matrix engine multiplies. float16 is not among them: scores beyond 65504 are ordinary numbers."""
    return torch.bfloat16 if query.dtype == cache.dtype == torch.bfloat16 else torch.float32


def scale_query(query: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The query times the scale: there are fewer of these than scores."""
    return (query.float() * scale).to(dtype)


def attend_tile(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, tokens: Tensor | None = None) -> Partial:
    """Partial of query [..., rows, heads, dim], which is scaled, over key and value [..., keys, kv_heads, dim].

    visible: bool [..., rows, keys].
    tokens: bool [..., keys], where all rows see the same keys or none; then the others' values are left out, and a
        broken value shows itself. Without it, a row that sees a broken value is marked by a sum of NaN.

    Returns out in the dtype of the products; max and sum are float32.
    """
    kv_heads, dtype = key.shape[-2], query.dtype
    folded = query.unflatten(-2, (kv_heads, -1)).movedim(-3, -4)
    groups = folded.shape[-2]
    scores = folded.flatten(-3, -2) @ key.to(dtype).movedim(-2, -3).transpose(-1, -2)
    scores = scores.unflatten(-2, (-1, groups))
    scores = scores.masked_fill(~visible[..., None, :, None, :], NEG_INF)
    weights, top, total = _softmax(scores)
    if tokens is not None:
        value = value.masked_fill(~tokens[..., None, None], 0)
    else:
        broken = ~value.isfinite().all(-1)
        value = value.nan_to_num(0.0, 0.0, 0.0)
        tainted = visible.to(dtype) @ broken.to(dtype) > 0
        total = total.masked_fill(tainted.transpose(-1, -2)[..., None], float("nan"))
    out = weights.to(dtype).flatten(-3, -2) @ value.to(dtype).movedim(-2, -3)
    out = out.unflatten(-2, (-1, groups))
    return Partial(_rows_first(out, -4), _rows_first(top, -3), _rows_first(total, -3))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum), and float32 maxima and sums over the last dimension; -inf and 0 where all are -inf."""
    if scores.dtype == torch.bfloat16 and hpu_kernels.SOFTMAX_FA2 is not None:
        return hpu_kernels.fused_softmax(scores, hpu_kernels.SOFTMAX_FA2)
    wide = scores.float()
    top = wide.amax(-1)
    weights = torch.exp(wide - shift(top)[..., None])
    return weights, top, weights.sum(-1)


def _rows_first(tensor: Tensor, heads: int) -> Tensor:
    """[..., kv_heads, rows, groups, ...] as [..., rows, heads, ...]; `heads`: where the kv heads are."""
    return tensor.movedim(heads, heads + 1).flatten(heads + 1, heads + 2)
