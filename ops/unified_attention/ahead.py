"""Attention of rows to later new tokens of the same span, such as a picture in a prompt.

It is added to a result that has everything before a row, so it works with any implementation that gives logarithms of
sums. Nothing here reads a tensor on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import NEG_INF, Partial, combine, shift
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

ROW_TILE = 256


def add_ahead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    longest: int,
    spec: AttentionSpec,
    out: Tensor,
    log_sums: Tensor,
) -> Tensor:
    """Adds to attention what rows see behind them.

    query: [rows, heads, dim]; key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim]: the new tokens.
    spans: int [rows], the span of each row, whose rows lie together; 0: none. longest: rows of the longest span.
    out, log_sums: results of `unified_attention`; out is also written.

    Returns out.
    """
    count, pieces = query.shape[0], []
    place = torch.arange(count, device=query.device)
    for first in range(0, count, ROW_TILE):
        rows, behind = slice(first, min(first + ROW_TILE, count)), slice(first, min(first + ROW_TILE + longest, count))
        own = spans[rows, None]
        visible = (own == spans[None, behind]) & (own > 0) & (place[None, behind] > place[rows, None])
        more = _attended(query[rows], key[behind], value[behind], visible, spec)
        logs = log_sums[rows]
        found = combine(Partial(out[rows].float(), logs, torch.ones_like(logs)), more)
        pieces.append(found.out / found.sum[..., None])
    return out.copy_(torch.cat(pieces))


def _attended(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, spec: AttentionSpec) -> Partial:
    """Returns the partial of query [rows, heads, dim] over key and value [tokens, kv_heads, dim]. visible: bool
    [rows, tokens]. A row that sees a token with NaN or Inf is NaN; see the reference.
    """
    kv_heads = key.shape[1]
    folded = query.float().unflatten(1, (kv_heads, -1))
    broken = ((key - key).sum(-1) + (value - value).sum(-1)).float().transpose(0, 1)[None, :, None]
    scores = torch.einsum("rhgd,shd->rhgs", folded, key.float()) * spec.scale
    if spec.logits_soft_cap is not None:
        scores = torch.tanh(scores / spec.logits_soft_cap) * spec.logits_soft_cap
    scores = torch.where(visible[:, None, None], scores + broken, NEG_INF)
    top = scores.amax(-1)
    weights = torch.exp(scores - shift(top)[..., None])
    out = torch.einsum("rhgs,shd->rhgd", weights, torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0).float())
    return Partial(out.flatten(1, 2), top.flatten(1), weights.sum(-1).flatten(1))
