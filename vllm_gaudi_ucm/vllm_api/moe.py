"""Mixtures of experts: `vllm.model_executor.layers.fused_moe`.

Extension point: a platform plugin replaces `UnquantizedFusedMoEMethod`, which computes routed experts, and `MoERunner`,
which routes, by subclasses. `MoEActivation` names gates.
Internal: `RoutedExperts`, which holds the weights; the routers, whose choices stay vLLM's; `ForwardContext.is_padding`.
"""

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter, grouped_topk
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

__all__ = [
    "DirectMoERunner",
    "MoEActivation",
    "MoERunner",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "padded_rows",
    "router_without_kernels",
]

Choice = tuple[torch.Tensor, torch.Tensor]
"""Weights float32 [rows, chosen], and ids."""

Choose = Callable[..., Choice]
"""Like `ops.moe.choice.choose_experts`."""


def padded_rows() -> torch.Tensor | None:
    """Returns bool [rows] of the running step, True for padding of a bucket; None if unknown.

    Reason: vLLM's layers find data of a step in `ForwardContext`.
    Remove when: routed experts are told which rows are padding.
    """
    return get_forward_context().is_padding if is_forward_context_available() else None


class DirectMoERunner(MoERunner):
    """vLLM's mixture of experts, called directly.

    Reason: `MoERunner.forward` calls itself through an opaque operator, by its layer's name: that has no lowering on
    Gaudi, and a name that differs between layers compiles each of them again. Only on its own CPU platform does vLLM
    bypass it.
    Remove when: `MoERunner` asks the platform whether it needs the operator.
    """

    def _select_forward(self) -> Callable[..., Any]:
        return self._call_directly

    def _encode_layer_name(self) -> str:
        return ""

    def _sequence_parallel_context(self) -> AbstractContextManager[None]:
        """vLLM's counts the rows of all engines, on the host; ours have as many each."""
        return nullcontext()

    def _call_directly(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: str,
        hidden_dim_unpadded: int,
    ) -> Any:
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)


def router_without_kernels(router: Any, choose: Choose, scores: Collection[str]) -> Any:
    """Returns a router with the same choices as `router`, made by `choose` if it knows the scores, or by torch's
    operators.

    Reason: vLLM's routers call compiled operators (`topk_softmax`, `topk_sigmoid`), which its empty-device build lacks,
    or torch.compile, which cannot be nested in another compiled region. Its CPU platform has a router of torch's
    operators, but not of all kinds, and no other platform gets it.
    Remove when: vLLM's routers have a form without kernels.

    Raises:
        LookupError: another kind of router, or a score that has none; the message names it.
    """
    replaced = _ROUTERS.get(type(router))
    if replaced is None:
        raise LookupError(f"routing by {type(router).__name__}")
    if replaced is _BiasedRouter and router.scoring_func not in scores:
        raise LookupError(f"routing by {router.scoring_func}")
    router.__class__ = replaced
    router.choose = choose
    return router


class _PlainRouter(FusedTopKRouter):
    """The k best by softmax or sigmoid."""

    choose: Choose

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Choice:
        score, dtype = self.scoring_func, indices_type or torch.int32
        return self.choose(router_logits, self.top_k, score, self.renormalize, dtype=dtype)


class _BiasedRouter(FusedTopKBiasRouter):
    """The k best by score and a bias that corrects the load."""

    choose: Choose

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Choice:
        bias = self.e_score_correction_bias
        scale, dtype = self.routed_scaling_factor, indices_type or torch.int32
        return self.choose(router_logits, self.top_k, self.scoring_func, self.renormalize, bias, scale, dtype)


class _GroupedRouter(GroupedTopKRouter):
    """The k best of the best groups, by vLLM's own function, which it compiles; of all groups without it."""

    choose: Choose

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Choice:
        experts, bias = router_logits.shape[-1], self.e_score_correction_bias
        scale, dtype = self.routed_scaling_factor, indices_type or torch.int32
        if experts <= self.num_expert_group or experts % self.num_expert_group:
            # as vLLM does; without a bias it scores by softmax, and does not scale
            score, scale = ("softmax", 1.0) if bias is None else (self.scoring_func, scale)
            return self.choose(router_logits, self.top_k, score, self.renormalize, bias, scale, dtype)
        if self.topk_group == self.num_expert_group:
            return self.choose(router_logits, self.top_k, self.scoring_func, self.renormalize, bias, scale, dtype)
        return _grouped_topk(
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=bias,
        )


# the function that torch.compile wraps
_grouped_topk: Callable[..., Choice] = inspect.unwrap(grouped_topk)

_ROUTERS: dict[type[Any], type[Any]] = {
    FusedTopKRouter: _PlainRouter,
    FusedTopKBiasRouter: _BiasedRouter,
    GroupedTopKRouter: _GroupedRouter,
    # the model's own function, of torch's operators
    CustomRoutingRouter: CustomRoutingRouter,
}
