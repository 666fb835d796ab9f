"""Mixtures of experts of vLLM's models: vLLM does the routing, and `ops/moe` computes the experts, on any device."""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.moe.api import Experts, mixture_of_experts, pack_experts, prepare_experts
from vllm_gaudi_ucm.ops.moe.choice import SCORES, choose_experts
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import CODES, MoeSpec
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.distributed import get_dp_group
from vllm_gaudi_ucm.vllm_api.model import op_registry_oot
from vllm_gaudi_ucm.vllm_api.moe import (
    DirectMoERunner,
    MoEActivation,
    MoERunner,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    padded_rows,
    router_without_kernels,
)

logger = plugin_logger(__name__)

ExpertForm = Literal["auto", "codes", "plain"]
"""The form in which quantised experts are kept; `auto`: codes if the device multiplies them as fast as plain
weights.
"""

# gpt-oss: these numbers are fixed in vLLM's kernels.
OAI_ALPHA, OAI_BETA, OAI_LIMIT = 1.702, 1.0, 7.0


def moe_spec(layer: RoutedExperts) -> MoeSpec:
    """Returns the specification of a layer's experts.

    Raises UnsupportedFeatureError for an unknown gate.
    """
    config = layer.moe_config
    bias, limit = bool(config.has_bias), config.swiglu_limit
    match layer.activation:
        case MoEActivation.SILU:
            return MoeSpec(limit=limit, bias=bias)
        case MoEActivation.GELU:
            return MoeSpec("gelu", bias=bias)
        case MoEActivation.GELU_TANH:
            return MoeSpec("gelu_tanh", bias=bias)
        case MoEActivation.SWIGLUOAI:
            return MoeSpec(interleaved=True, alpha=OAI_ALPHA, beta=OAI_BETA, limit=OAI_LIMIT, bias=bias)
        case MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            alpha = 1.0 if config.swiglu_alpha is None else config.swiglu_alpha
            return MoeSpec(alpha=alpha, beta=config.swiglu_beta or 0.0, limit=limit, bias=bias)
    raise UnsupportedFeatureError(
        f"experts with the gate {layer.activation.value}", f"the model's layer {layer.layer_name}"
    )


def checked_spec(layer: RoutedExperts) -> MoeSpec:
    """Returns the specification of a layer's experts.

    Raises UnsupportedFeatureError for experts that are not supported, before weights are read.
    """
    if layer.apply_router_weight_on_input and layer.moe_config.experts_per_token > 1:
        raise UnsupportedFeatureError(
            "several experts for each row with shares that weigh the rows instead of the experts' results "
            "(take a model with num_experts_per_tok 1)",
            f"the model's layer {layer.layer_name}",
        )
    return moe_spec(layer)


class ServedMoeRunner(DirectMoERunner):
    """vLLM's mixture of experts; routings that are not supported are refused by name."""

    def __init__(self, layer_name: str, moe_config: Any, router: Any, *arguments: Any, **named: Any) -> None:
        try:
            router = router_without_kernels(router, choose_experts, SCORES)
        except LookupError as error:
            raise UnsupportedFeatureError(str(error), f"the model's layer {layer_name}") from error
        super().__init__(layer_name, moe_config, router, *arguments, **named)

    def _forward_impl(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found: Any = super()._forward_impl(hidden_states, *arguments, **named)
        if self.moe_config.dp_size == 1:
            return found
        rows = len(hidden_states)
        return (found[0], found[1][:rows]) if isinstance(found, tuple) else found[:rows]

    def _maybe_dispatch(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers rows of all engines, one after the other, each padded to the longest step (see `padded_rows`)."""
        if self.moe_config.dp_size == 1:
            return hidden_states, router_logits
        engines, padding, own = get_dp_group(), padded_rows(), len(hidden_states)
        each = own if padding is None else len(padding) // engines.world_size
        filled = [functional.pad(rows, (0, 0, 0, each - own)) for rows in (hidden_states, router_logits)]
        if hidden_states.dtype != router_logits.dtype:
            hidden_states, router_logits = (engines.all_gather(rows, 0) for rows in filled)
            return hidden_states, router_logits
        # one collective takes less time than two
        both = engines.all_gather(torch.cat(filled, 1), 0)
        hidden_states, router_logits = both.split([hidden_states.shape[1], router_logits.shape[1]], 1)
        return hidden_states.contiguous(), router_logits

    def _maybe_combine(self, shared_output: torch.Tensor | None, hidden_states: Any) -> Any:
        """Returns what all experts add to this engine's rows, and to fillers."""
        if self.moe_config.dp_size > 1:
            hidden_states = get_dp_group().reduce_scatter(hidden_states, 0)
        return hidden_states if self.shared_experts is None else (shared_output, hidden_states)


class ExpertsMethod(UnquantizedFusedMoEMethod):
    """Computes the experts of a layer that are on this device; vLLM's runner adds up the results of devices."""

    quantised = False
    """True if the checkpoint's weights were quantised."""
    _experts: Experts | None = None
    _here: torch.Tensor | None = None

    @property
    def experts(self) -> Experts:
        assert self._experts is not None, "prepare_model_experts runs after weights are loaded"
        return self._experts

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of ids that Gaudi's operator needs."""
        return torch.int64

    @property
    def is_monolithic(self) -> bool:
        """False: the runner does the routing. vLLM would ask its class of kernels, and there is none."""
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        checked_spec(layer)
        super().create_weights(layer, *arguments, **named)

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        self._complete(layer)

    def _complete(self, layer: Any) -> None:
        # the runner reads it in its first forward, which may be traced
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        if layer.expert_map is not None:
            placed = layer.expert_map.to(torch.int64)
            # above all numbers, as an expert of the next device is
            self._here = placed.masked_fill(placed < 0, layer.local_num_experts)

    def prepare(self, layer: Any, captured: bool, packed: bool, compact: bool, keep: ExpertForm) -> None:
        """Called once the weights are loaded; see `prepare_model_experts`."""
        weights, spec = _weights(layer), moe_spec(layer)
        self._experts = pack_experts(weights, spec, compact) if packed else None
        if self._experts is None:
            self._experts = prepare_experts(weights, spec, captured=captured)
            return
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data = weight.new_empty(0)

    def apply(  # type: ignore[override]  # a method of weights, by vLLM's signature, which is a module, too
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes x [rows, hidden]. The runner computes shared experts. Padded rows take no expert."""
        experts = self.experts
        ids = topk_ids
        if self._here is not None:
            ids = self._here.index_select(0, ids.flatten()).view(ids.shape)
        padding = padded_rows()
        if padding is not None:
            ids = ids.masked_fill(padding.unsqueeze(1), experts.count)
        if layer.apply_router_weight_on_input:
            # Llama 4: one expert for each row
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return mixture_of_experts(x, ids, topk_weights, experts)


def _weights(layer: Any) -> ExpertWeights:
    biases = (getattr(layer, name, None) for name in ("w13_bias", "w2_bias"))
    return ExpertWeights(layer.w13_weight.data, layer.w2_weight.data, *(None if b is None else b.data for b in biases))


def register_experts() -> None:
    """Builds models that are loaded afterwards in this process with our experts. Safe to call more than once."""
    for layer, ours in ((MoERunner, ServedMoeRunner), (UnquantizedFusedMoEMethod, ExpertsMethod)):
        if layer.__name__ not in op_registry_oot:
            layer.register_oot(ours)


def prepare_model_experts(
    model: nn.Module, *, captured: bool, packed: bool = False, compact: bool = False, keep: ExpertForm = "auto"
) -> None:
    """Prepares the experts of a loaded model, and logs how they are computed.

    captured: steps have static shapes. packed: packs weights for a CPU, and gives the plain ones back to the system;
        not with `captured`. compact: looks for forms of fewer bits as well. keep: the form of quantised experts.
    """
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    experts: Experts | None = None
    quantised = False
    for layer in layers:
        method = layer.quant_method
        if not isinstance(method, ExpertsMethod):
            raise UnsupportedFeatureError("quantised experts", f"the model's layer {layer.layer_name}")
        method.prepare(layer, captured, packed, compact, keep)
        experts, quantised = method.experts, quantised or method.quantised
    if experts is not None:
        logger.info(
            "%d layers of %d experts here, computed by %r%s%s",
            *(len(layers), experts.count, experts.implementation.name),
            "" if experts.kept is not None else ", packed",
            _said_of_codes(experts) if quantised else "",
        )


def _said_of_codes(experts: Experts) -> str:
    return ", which stay quantised" if experts.spec.weights == CODES else ", dequantised"
