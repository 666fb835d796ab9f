"""Matrix products and softmax of the hpu implementation, in operators that Gaudi has.

Scores are float32, whatever the inputs are. A product of bfloat16 tensors is rounded to bfloat16, so a score near 20
would be off by up to 1/16 and its weight by 6 %. Operands are therefore widened first. This costs bandwidth, but every
backend traces and computes this form alike. `Products` is the only place to change once a device is known to add up
bfloat16 into a float32 result (CUDA does, by `bmm` with `out_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

LOWEST = torch.finfo(torch.float32).min
"""Score of tokens that a row does not see. It is finite, because -inf - -inf is NaN; compared with any real score its
weight is 0.
"""
SEES_NOTHING = LOWEST / 2
"""A row whose maximum is not above this has seen no token."""
LEAST_SUM = 1e-30
"""Initial value of a sum: the largest score of a row has weight 1, so it changes no row that has seen a token."""


class Seen(NamedTuple):
    """Un-normalised softmax of the tokens that rows have seen so far: like `Partial`, with heads in groups and finite
    numbers.

    out: fp32 [rows, kv_heads, groups, value_dim].
    max, sum: fp32 [rows, kv_heads, groups]. The maximum is at most SEES_NOTHING if the row has seen no token; its out
        and sum are then finite and meaningless.
    """

    out: Tensor
    max: Tensor
    sum: Tensor


class Products(NamedTuple):
    """The products of a layer. scale, cap: applied to scores. narrow: bfloat16 is multiplied as it is, into float32.

    values_in_keys: values are the first elements of keys, see `AttentionSpec`.
    slopes: fp32 [kv_heads, groups] of distances, see `PerHead`; None: distances do not count.
    """

    scale: float
    narrow: bool
    cap: float | None = None
    values_in_keys: bool = False
    slopes: Tensor | None = None

    @classmethod
    def from_query(cls, query: Tensor, cache: Tensor, spec: AttentionSpec, slopes: Tensor | None = None) -> Products:
        """Makes the products of a layer. slopes: fp32 [heads]."""
        narrow = query.device.type == "cuda" and query.dtype == cache.dtype == torch.bfloat16
        by_group = None if slopes is None else slopes.view(cache.shape[2], -1)
        return cls(spec.scale, narrow, spec.logits_soft_cap, spec.values_in_keys, by_group)

    def read(self, key_cache: Tensor, value_cache: Tensor, take: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Gathers from both caches; values that are a part of keys are not gathered twice."""
        key = take(key_cache)
        return key, key[..., : value_cache.shape[-1]] if self.values_in_keys else take(value_cache)

    def query(self, query: Tensor, kv_heads: int) -> Tensor:
        """Prepares [rows, heads, dim] as the left side of scores: [kv_heads, rows, groups, dim] without gaps."""
        folded = query.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        return packed(folded, query.dtype) if self.narrow else (packed(folded, torch.float32) * self.scale).contiguous()

    def key(self, key: Tensor) -> Tensor:
        """Prepares keys as the right side of scores, in this order of dimensions and without gaps."""
        return packed(key, key.dtype if self.narrow else torch.float32)

    def key_view(self, key: Tensor) -> Tensor:
        """Returns the same as a view of widened keys, for a product that supports gaps."""
        return key if self.narrow else key.float()

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns scores fp32 [batch, rows, keys] of query [batch, rows, dim] and key [batch, keys, dim], both
        prepared.
        """
        if self.narrow:
            found = torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32) * self.scale
        else:
            found = torch.bmm(query, key.transpose(1, 2))
        return found if self.cap is None else torch.tanh(found * (1 / self.cap)) * self.cap

    def by_distance(self, scores: Tensor, distances: Tensor | None) -> Tensor:
        """Subtracts from scores fp32 [kv_heads, ..., groups, tokens] the slopes times distances fp32 [..., 1, tokens],
        in tokens.
        """
        if self.slopes is None or distances is None:
            return scores
        kv_heads, groups = self.slopes.shape
        slopes = self.slopes.view(kv_heads, *[1] * (scores.dim() - 3), groups, 1)
        return scores - slopes * distances


def packed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies a tensor to dense memory in its order of dimensions, by one operator."""
    if tensor.dtype == dtype:
        return tensor.contiguous()
    return tensor.to(dtype, memory_format=torch.contiguous_format)


def value_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which weights and values are multiplied. float16 would overflow: results are not normalised yet."""
    return torch.bfloat16 if value.dtype == torch.bfloat16 else torch.float32


def weigh(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exp(scores - maximum), and the maxima and sums over the last dimension."""
    top = scores.amax(-1)
    weights = torch.exp(scores - top[..., None])
    return weights, top, weights.sum(-1)


def without_garbage(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Cleans keys and values [tokens, kv_heads, ...] for rows of which some see a token and some do not.

    A weight of 0 times NaN is NaN, so broken values become 0, and their key becomes NaN instead. It makes the scores
    NaN for exactly the rows that see the token, because the scores of other rows are replaced.
    """
    broken = value - value  # 0, or NaN where the value is NaN or Inf
    return key + broken.sum(-1, keepdim=True).to(key.dtype), value.masked_fill(broken != 0, 0)


def write(seen: Seen | None, out: Tensor, sinks: Tensor | None = None, log_sums: Tensor | None = None) -> None:
    """Normalises to out [rows, heads, value_dim]. A head with an element that is not finite becomes NaN as a whole.

    sinks: fp32 [heads], one more term of each sum. log_sums: fp32 [rows, heads], see `unified_attention`.
    """
    if seen is None:
        out.zero_()
        if log_sums is not None:
            log_sums.fill_(LOWEST)
        return
    if log_sums is not None:
        log_sums.copy_((seen.max + seen.sum.log()).clamp(min=LOWEST).flatten(1))
    total, shrink = seen.sum, None
    if sinks is not None:
        logits = sinks.view(1, *seen.max.shape[1:])
        top = torch.maximum(seen.max, logits)
        shrink = torch.exp(seen.max - top)
        total = total * shrink + torch.exp(logits - top)
    factor = (seen.max > SEES_NOTHING) / total
    if shrink is not None:
        factor = factor * shrink
    found = seen.out * factor[..., None]
    found = found + (found - found).sum(-1, keepdim=True)
    out.unflatten(1, found.shape[1:3]).copy_(found)
