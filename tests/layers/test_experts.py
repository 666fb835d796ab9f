"""Routers of torch's operators choose as vLLM's do, gates have their numbers, and what is unknown is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from tests.layers.experts import layer
from vllm_gaudi_ucm.layers.experts import moe_spec
from vllm_gaudi_ucm.ops.moe.choice import SCORES, choose_experts
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.moe import (
    CustomRoutingRouter,
    FusedTopKBiasRouter,
    FusedTopKRouter,
    GroupedTopKRouter,
    router_without_kernels,
)

LOGITS = torch.randn(7, 8, generator=torch.Generator().manual_seed(3))
BIAS = torch.linspace(-0.5, 0.5, 8)


def route(router: BaseRouter) -> torch.Tensor:
    """[rows, experts]: the weight of each, 0 where it was not chosen."""
    weights, ids = router_without_kernels(router, choose_experts, SCORES).select_experts(
        hidden_states=torch.zeros(7, 4), router_logits=LOGITS, topk_indices_dtype=torch.int64
    )
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    return torch.zeros(7, 8).scatter(1, ids, weights)


def best(scores: torch.Tensor, by: torch.Tensor, count: int, renormalise: bool) -> torch.Tensor:
    """Row by row."""
    found = torch.zeros_like(scores)
    for row in range(len(scores)):
        chosen = sorted(range(scores.shape[1]), key=lambda number: -float(by[row, number]))[:count]
        found[row, chosen] = scores[row, chosen]
    return found / found.sum(1, keepdim=True) if renormalise else found


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routers(score: str, renormalise: bool) -> None:
    """Plain, with a bias that chooses and does not weigh, and of groups."""
    scores = LOGITS.softmax(-1) if score == "softmax" else LOGITS.sigmoid()
    common: dict[str, Any] = {
        "top_k": 3,
        "global_num_experts": 8,
        "scoring_func": score,
        "renormalize": renormalise,
        "eplb_state": None,
    }
    torch.testing.assert_close(route(FusedTopKRouter(**common)), best(scores, scores, 3, renormalise))
    biased = FusedTopKBiasRouter(**common, e_score_correction_bias=BIAS, routed_scaling_factor=2.5)
    torch.testing.assert_close(route(biased), 2.5 * best(scores, scores + BIAS, 3, renormalise))
    grouped = GroupedTopKRouter(**common, num_expert_group=4, topk_group=2, routed_scaling_factor=2.0)
    of_group = scores.view(7, 4, 2).max(-1).values
    kept = of_group >= of_group.topk(2).values[:, -1:]
    by = scores.masked_fill(~kept.repeat_interleave(2, 1), -1)
    torch.testing.assert_close(route(grouped), 2.0 * best(scores, by, 3, renormalise))
    # eight groups of one, which vLLM does not take for groups
    apart = GroupedTopKRouter(
        **common, num_expert_group=8, topk_group=2, e_score_correction_bias=BIAS, routed_scaling_factor=2.0
    )
    torch.testing.assert_close(route(apart), 2.0 * best(scores, scores + BIAS, 3, renormalise))


def test_a_model_s_own_routing_stays() -> None:
    router = CustomRoutingRouter(1, 8, lambda gating_output, topk, **others: gating_output.sigmoid().topk(topk), None)
    torch.testing.assert_close(route(router), best(LOGITS.sigmoid(), LOGITS, 1, False))


def test_routers_that_are_unknown() -> None:
    with pytest.raises(LookupError, match="routing by SimpleNamespace"):
        router_without_kernels(SimpleNamespace(), choose_experts, SCORES)
    router = FusedTopKBiasRouter(2, 8, scoring_func="sqrtsoftplus", e_score_correction_bias=BIAS)
    with pytest.raises(LookupError, match="routing by sqrtsoftplus"):
        router_without_kernels(router, choose_experts, SCORES)


def test_gates() -> None:
    assert moe_spec(layer("silu")) == MoeSpec()
    assert moe_spec(layer("silu", swiglu_limit=10.0)) == MoeSpec(limit=10.0)
    assert moe_spec(layer("gelu", has_bias=True)) == MoeSpec("gelu", bias=True)
    assert moe_spec(layer("gelu_pytorch_tanh")) == MoeSpec("gelu_tanh")
    gpt_oss = MoeSpec(interleaved=True, alpha=1.702, beta=1.0, limit=7.0, bias=True)
    assert moe_spec(layer("swigluoai", has_bias=True)) == gpt_oss
    packed = layer("swigluoai_uninterleave", swiglu_alpha=1.5, swiglu_beta=1.0, swiglu_limit=7.0)
    assert moe_spec(packed) == MoeSpec(alpha=1.5, beta=1.0, limit=7.0)
    with pytest.raises(UnsupportedFeatureError, match=r"experts with the gate relu2_no_mul .*layers\.1"):
        moe_spec(layer("relu2_no_mul"))
