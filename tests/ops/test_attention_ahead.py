"""Rows that see each other in both directions inside of a span, on top of every implementation that gives sums."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi_ucm.ops.unified_attention.ahead import add_ahead
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

HEADS, KV_HEADS, DIM = 4, 2, 16
# two requests: text, a picture of 300, text; two pictures of 5, one behind the other
SPANS = torch.tensor([0] * 3 + [1] * 300 + [0] * 2 + [7] * 5 + [8] * 5 + [0])
GROUPS = torch.tensor([0] * 305 + [1] * 11, dtype=torch.int32)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """float64; a row sees its own span, and what is before it in its window."""
    place = torch.arange(len(query))
    before = place[None] <= place[:, None]
    if window is not None:
        before &= place[:, None] - place[None] < window
    together = (SPANS[:, None] == SPANS[None]) & (SPANS[:, None] > 0) & (place[None] > place[:, None])
    visible = (GROUPS[:, None] == GROUPS[None]) & (before | together)
    key, value = (one.double().repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
    scores = torch.einsum("rhd,shd->hrs", query.double(), key) / DIM**0.5
    return torch.einsum("hrs,shd->rhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 310])
@pytest.mark.parametrize("implementation", ["reference", "cpu", "hpu"])
def test_rows_see_their_whole_span(implementation: str, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(len(SPANS), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    first = None if window is None else (torch.arange(len(SPANS)) - window + 1).clamp(min=0)
    causal = CausalPart(
        GROUPS, (CausalSlice(0, 305, 0, 305), CausalSlice(305, len(SPANS), 305, len(SPANS))), first_rows=first
    )
    spec = AttentionSpec(DIM**-0.5, is_local=window is not None)
    caches = torch.zeros(1, 16, KV_HEADS, DIM), torch.zeros(1, 16, KV_HEADS, DIM)
    parts = prepare(AttentionParts(causal), 16, implementation=implementation)
    log_sums = torch.empty(query.shape[:2])
    out = unified_attention(query, key, value, *caches, parts, spec, log_sums=log_sums)
    without = out.clone()
    found = add_ahead(query, key, value, SPANS, longest=300, spec=spec, out=out, log_sums=log_sums)
    assert found is out
    torch.testing.assert_close(out.double(), expected(query, key, value, window), atol=1e-5, rtol=1e-5)
    ahead = torch.cat([SPANS[:-1] == SPANS[1:], torch.tensor([False])]) & (SPANS > 0)
    assert not torch.isclose(out, without).all(-1).all(-1)[ahead].any()
    assert torch.equal(out[~ahead], without[~ahead])


def test_rows_that_see_nothing_are_zeros() -> None:
    query, key, value = (torch.randn(4, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, log_sums = torch.zeros(4, HEADS, DIM), torch.full((4, HEADS), torch.finfo(torch.float32).min)
    add_ahead(query, key, value, torch.zeros(4, dtype=torch.int64), 3, AttentionSpec(0.25), out, log_sums)
    assert not out.any()
