"""Partial results of attention: how they are added, reduced to rows and at last normalised, in plain torch.

A maximum of -inf and a sum of 0 say that a row has seen nothing, in every one of these. Source: design.md 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.index_maximum import index_maximum_
from vllm_gaudi_ucm.ops.unified_attention.parts import Partial

NEG_INF = float("-inf")


def merge(partials: Sequence[Partial], out: Tensor) -> Tensor:
    """Normalised softmax over all partials, written to `out` [rows, heads, value_dim]; rows that see nothing are zeros.

    A partial may cover only the first rows (the single rows come first): the others see none of its keys.
    """
    rows = out.shape[0]
    merged = nothing(out, rows, out.shape[-1])
    for partial in partials:
        covered = partial.max.shape[0]
        both = combine(Partial(*(whole[:covered] for whole in merged)), partial)
        for whole, first in zip(merged, both, strict=True):
            whole[:covered] = first
    # The largest score of a row has weight 1, so a sum of 0 means exactly: nothing seen.
    total = torch.where(merged.sum == 0, 1.0, merged.sum)
    return out.copy_(merged.out / total[..., None])


def combine(a: Partial, b: Partial) -> Partial:
    """Partial over the keys of both; either may have seen nothing in any row."""
    top = torch.maximum(a.max, b.max)
    weight_a, weight_b = torch.exp(a.max - shift(top)), torch.exp(b.max - shift(top))
    out = a.out * weight_a[..., None] + b.out * weight_b[..., None]
    return Partial(out, top, a.sum * weight_a + b.sum * weight_b)


def shift(top: Tensor) -> Tensor:
    """What to subtract from scores: the maximum, or 0 where it is -inf, because -inf - -inf is NaN."""
    return torch.where(top == NEG_INF, 0.0, top)


def reduce_to_rows(pieces: Partial, rows: Tensor, result: Partial) -> Partial:
    """Adds pieces [pieces, heads, ...], each of the row that `rows` names, to a result that has seen nothing yet."""
    index_maximum_(result.max, rows, pieces.max)
    weight = torch.exp(pieces.max - shift(result.max)[rows])
    result.sum.index_add_(0, rows, pieces.sum * weight)
    result.out.index_add_(0, rows, pieces.out * weight[..., None])
    return result


def nothing(like: Tensor, rows: int, value_dim: int) -> Partial:
    """Partial of rows that have seen no key yet."""
    heads = like.shape[1]
    out = like.new_zeros((rows, heads, value_dim), dtype=torch.float32)
    top = like.new_full((rows, heads), NEG_INF, dtype=torch.float32)
    return Partial(out, top, like.new_zeros((rows, heads), dtype=torch.float32))
