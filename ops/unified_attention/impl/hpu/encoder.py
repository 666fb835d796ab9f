"""Attention of encoders on a Gaudi: products of all rows with the rows near them, and a mask by request.

The rows of a request are data, so a slice of rows is multiplied with as many rows on both sides as a request can have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import kernels as hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.fused import attend_hidden, finite
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import (
    LOWEST,
    Products,
    Seen,
    value_dtype,
    weigh,
    without_garbage,
    write,
)
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalSlice
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead


class Strip(NamedTuple):
    """A slice of rows. hidden: bool [rows, tokens], the tokens of other requests. distance: int64 [rows, tokens]."""

    bounds: CausalSlice
    hidden: Tensor
    distance: Tensor


class HpuEncoder(AttentionImplementation):
    """Attention of encoders for Gaudi; runs on any device if chosen by name."""

    devices = frozenset({"hpu"})
    priority = 10  # lower than implementations for decoders, which refuse encoders

    def supports(self, spec: AttentionSpec) -> bool:
        return spec.is_plain_encoder

    def unavailable(self, device: str) -> str | None:
        return None

    def plan(self, parts: AttentionParts, block_size: int) -> list[Strip]:
        """Reads nothing on the host."""
        if parts.causal is None:
            return []
        groups = parts.causal.groups
        place = torch.arange(groups.shape[0], device=groups.device)
        found = []
        for bounds in parts.causal.slices:
            rows, keys = slice(bounds.query_lo, bounds.query_hi), slice(bounds.key_lo, bounds.key_hi)
            own = groups[rows, None]
            hidden = (own != groups[keys]) | (own < 0)
            found.append(Strip(bounds, hidden, (place[keys] - place[rows, None]).abs()))
        return found

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: list[Strip],
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface. False if sums are requested."""
        if log_sums is not None:
            return False
        if not plan:
            out.zero_()
            return True
        hidden = [one.hidden if spec.reach is None else one.hidden | (one.distance >= spec.reach) for one in plan]
        fused = hpu_kernels.FUSED_SDPA
        if fused is None or query.dtype != torch.bfloat16 or value.shape[-1] != query.shape[-1]:
            write(_by_products(query, key, value, plan, hidden, Products.from_query(query, key_cache, spec)), out)
            return True
        key, value, broken = finite(key, value, query.dtype)
        pieces = []
        for one, unseen in zip(plan, hidden, strict=True):
            rows, keys = _places(one.bounds)
            tensors = query[None, rows], key[None, keys], value[None, keys], broken[None, keys]
            pieces.append(attend_hidden(*tensors, unseen[None], spec.scale, fused)[0])
        # without a visible token, the kernel returns the mean of all
        sees = torch.cat([(~unseen).any(1) for unseen in hidden])
        out.copy_(torch.cat(pieces).masked_fill(~sees[:, None, None], 0))
        return True


def _places(bounds: CausalSlice) -> tuple[slice, slice]:
    return slice(bounds.query_lo, bounds.query_hi), slice(bounds.key_lo, bounds.key_hi)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, plan: list[Strip], hidden: list[Tensor], products: Products
) -> Seen:
    groups = query.shape[1] // key.shape[1]
    query = products.query(query, key.shape[1])
    key, value = without_garbage(key, value)
    key, value = products.key_view(key), value.to(value_dtype(value))
    pieces = []
    for one, unseen in zip(plan, hidden, strict=True):
        rows, keys = _places(one.bounds)
        count = unseen.shape[0]
        scores = products.scores(query[:, rows].flatten(1, 2), key[keys].transpose(0, 1)).unflatten(1, (count, groups))
        weights, top, total = weigh(scores.masked_fill(unseen[:, None], LOWEST))
        found = torch.bmm(weights.flatten(1, 2).to(value.dtype), value[keys].transpose(0, 1))
        pieces.append((found.unflatten(1, (count, groups)), top, total))
    found, top, total = (torch.cat(column, 1).transpose(0, 1) for column in zip(*pieces, strict=True))
    return Seen(found.float(), top, total)
