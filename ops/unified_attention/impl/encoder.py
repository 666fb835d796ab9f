"""Attention of encoders by torch's own kernels: one call for all requests of the same length, on a CPU or a GPU.

Requests are apart, so a request with a NaN reaches no other one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead


class Requests(NamedTuple):
    """Consecutive requests of the same length: rows [first, first + number * length)."""

    first: int
    number: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.number * self.length)


class EncoderAttention(AttentionImplementation):
    """Attention of encoders at true shapes: the slices of the causal part say which rows are a request."""

    devices = frozenset({"cpu", "cuda"})
    priority = 5  # lower than implementations for decoders, which refuse encoders
    capturable = False
    traceable = False

    def supports(self, spec: AttentionSpec) -> bool:
        return spec.is_plain_encoder

    def plan(self, parts: AttentionParts, block_size: int) -> list[Requests]:
        """Returns the requests of a step, joined if they have one length."""
        if parts.causal is None:
            return []
        bounds = sorted({one.key_lo for one in parts.causal.slices} | {one.key_hi for one in parts.causal.slices})
        found: list[Requests] = []
        for first, end in pairwise(bounds):
            last = found[-1] if found else None
            if last is not None and last.length == end - first:
                found[-1] = last._replace(number=last.number + 1)
            else:
                found.append(Requests(first, 1, end - first))
        return found

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: list[Requests],
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface. False if sums are requested."""
        if log_sums is not None:
            return False
        grouped = query.shape[1] != key.shape[1]
        for requests in plan:
            rows, shape = requests.rows, (requests.number, requests.length)
            q, k, v = (tensor[rows].unflatten(0, shape).transpose(1, 2) for tensor in (query, key, value))
            mask = near(requests.length, spec.reach, query.device)
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=grouped)
            out[rows].unflatten(0, shape).copy_(found.transpose(1, 2))
        return True


# A mask of 8,192 tokens has 64 MB.
@lru_cache(maxsize=16)
def near(length: int, reach: int | None, device: torch.device) -> Tensor | None:
    """Returns bool [length, length], the tokens within reach of each row; None if all are."""
    if reach is None or reach >= length:
        return None
    place = torch.arange(length, device=device)
    return (place - place[:, None]).abs() < reach
