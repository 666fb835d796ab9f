"""Packs a loaded model's linear layers for the CPU, through the method object that each vLLM layer computes with."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_gaudi_ucm.ops.packed_linear.api import PackedWeight, can_pack, pack, packed_linear


class PackedLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer with its packed weight."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self._weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """Computes logits with a packed copy of the output head's weight."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self._weight, bias)


def pack_linear_layers(model: nn.Module) -> int:
    """Packs every linear layer and output head that can be; returns how many.

    The plain weight of a linear layer is given back to the system: keeping both would double the model's memory. An
    output head keeps its own, because it may be the embedding's, whose rows are read one by one.
    """
    count = 0
    for layer in model.modules():
        is_linear = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        is_head = isinstance(layer, ParallelLMHead) and type(layer.quant_method) is UnquantizedEmbeddingMethod
        if not (is_linear or is_head) or not can_pack(layer.weight):
            continue
        weight = pack(layer.weight)
        layer.quant_method = PackedLinearMethod(weight) if is_linear else PackedHeadMethod(weight)
        if is_linear:
            layer.weight.data = layer.weight.new_empty(0)
        count += 1
    return count
