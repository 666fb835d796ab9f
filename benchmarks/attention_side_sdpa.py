"""torch SDPA in the CPU attention table, heads folded, on keys and values that are already contiguous per request.

It omits the gather that a paged cache would need, so it is faster than any form that could serve.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_case import DIM, HEADS, KV_HEADS, SCALE, Case, CaseData, context_of


def calls(case: Case, data: CaseData) -> dict[str, Callable[[], Tensor]]:
    contexts = (context_of(data, case, request) for request in range(case.requests))
    keys, values = (torch.stack(side).transpose(1, 2).contiguous() for side in zip(*contexts, strict=True))
    if case.new == 1:
        folded = data.query.view(case.requests, KV_HEADS, -1, DIM)
        return {"sdpa": lambda: scaled_dot_product_attention(folded, keys, values, scale=SCALE).view_as(data.query)}
    query = data.query.view(case.requests, case.new, HEADS, DIM).transpose(1, 2)
    keys, values = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (keys, values))
    mask = None
    if case.context:
        mask = torch.ones(case.new, case.tokens, dtype=torch.bool).tril(case.context)

    def run() -> Tensor:
        out = scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=SCALE)
        return out.transpose(1, 2).reshape_as(data.query)

    return {"sdpa": run}
