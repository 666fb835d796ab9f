"""Packs a loaded model's linear layers for the CPU, by replacing the method object of each vLLM layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PackedWeight, can_pack, multiplies_pairs, pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, learn_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind
from vllm_gaudi_ucm.vllm_api.model import (
    LinearBase,
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)


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


class PackedLayers(NamedTuple):
    """Counts of packed layers, and of those with a compact copy."""

    packed: int
    compact: int


def pack_linear_layers(model: nn.Module, compact: bool) -> PackedLayers:
    """Packs every linear layer and output head that can be. compact: look for forms of fewer bits as well.

    The plain weight of a linear layer is given back to the system: keeping both would double the model's memory. An
    output head keeps its plain weight, because the embedding may share it and reads its rows one by one.
    """
    weights: list[PackedWeight] = []
    if multiplies_pairs() and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        # before packing, which decides by it whether a copy for oneDNN is needed
        learn_ways({Kind.PAIRS})
    for layer in model.modules():
        plain = getattr(layer, "weight", None)
        # a layer whose weight another layer has taken has none left; weights of convolutions have three dimensions
        if not isinstance(plain, torch.Tensor) or not plain.numel() or plain.dim() != 2 or not can_pack(plain):
            continue
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            weights.append(pack(plain, compact))
            layer.quant_method = PackedLinearMethod(weights[-1])
            plain.data = plain.new_empty(0)
        elif isinstance(layer, ParallelLMHead) and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            weights.append(pack(plain, compact))
            layer.quant_method = PackedHeadMethod(weights[-1])
    learn_ways(kinds_of(weights))
    return PackedLayers(len(weights), sum(weight.compact is not None for weight in weights))
