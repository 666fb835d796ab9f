"""Packs a loaded model's linear layers for the CPU, through the method object that each vLLM layer computes with."""

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
    """How many layers were packed, and how many of these have a compact copy too."""

    packed: int
    compact: int


def pack_linear_layers(model: nn.Module, compact: bool) -> PackedLayers:
    """Packs every linear layer and output head that can be. compact: look for forms of fewer bits as well.

    The plain weight of a linear layer is given back to the system: keeping both would double the model's memory. An
    output head keeps its own, because it may be the embedding's, whose rows are read one by one.
    """
    weights: list[PackedWeight] = []
    if multiplies_pairs() and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        # before they are packed: whether they need a copy for oneDNN depends on it
        learn_ways({Kind.PAIRS})
    for layer in model.modules():
        plain = getattr(layer, "weight", None)
        # a layer that another has taken the weight of has none left
        if not isinstance(plain, torch.Tensor) or not plain.numel() or not can_pack(plain):
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
