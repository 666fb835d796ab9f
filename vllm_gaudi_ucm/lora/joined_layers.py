"""Linear layers whose own weight is in one tensor with the first matrices of their adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.vllm_api.lora import BaseLinearLayerWithLoRA
from vllm_gaudi_ucm.vllm_api.model import UnquantizedLinearMethod

if TYPE_CHECKING:
    from vllm_gaudi_ucm.lora.layer_adapters import LayerAdapters

# Outputs that a matrix library's fast products come in; others take slower ones.
MULTIPLE = 8
JOINS_ON = "cuda"


class JoinedLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer, unless its adapters have computed it with their first products. method: the layer's."""

    def __init__(self, method: UnquantizedLinearMethod, adapters: LayerAdapters) -> None:
        self._method, self._adapters = method, adapters

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found = self._adapters.own_product(x) if bias is None else None
        return self._method.apply(layer, x, bias) if found is None else found


def can_join(module: BaseLinearLayerWithLoRA) -> bool:
    """Returns whether a layer's own weight is a plain matrix on a GPU, without a bias that its product adds."""
    layer = module.base_layer
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    down, ups = module.lora_a_stacked, module.lora_b_stacked
    return (
        weight.device.type == JOINS_ON
        and weight.dtype == down[0].dtype
        and weight.shape == (sum(up.shape[2] for up in ups), down[0].shape[3])
        # not joined before: of two layers with one weight, the second would take it away from the first
        and weight.untyped_storage().nbytes() == weight.nbytes
        and getattr(layer, "bias", None) is None
        and down[0].shape[0] * down[0].shape[2] % MULTIPLE == 0
    )


def join(module: BaseLinearLayerWithLoRA) -> AdapterWeights:
    """Lays out a layer's adapters with its own weight, which stays the same parameter, now in other memory."""
    weight = cast(torch.Tensor, module.base_layer.weight)
    slots, _, rank, _ = module.lora_a_stacked[0].shape
    found = AdapterWeights.joined_with(weight.data, [up.shape[2] for up in module.lora_b_stacked], slots, rank)
    weight.data = found.own
    # its old memory fits no other layer's new one
    if weight.is_cuda:
        torch.cuda.empty_cache()
    return found


def compute_joined(module: BaseLinearLayerWithLoRA, adapters: LayerAdapters) -> None:
    """Has a layer take its own product from its adapters, if they computed it."""
    layer = module.base_layer
    layer.quant_method = JoinedLinearMethod(cast(UnquantizedLinearMethod, layer.quant_method), adapters)
