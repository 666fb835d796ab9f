"""Packs a loaded model's linear layers for the CPU, by replacing the method object of each vLLM layer."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import linear

from vllm_gaudi_ucm.ops.cpu.packed_linear.api import (
    PackedWeight,
    can_pack,
    multiplies_pairs,
    pack,
    packed_linear,
    plain_is_faster,
)
from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, learn_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import MEASURED_ROWS, Kind
from vllm_gaudi_ucm.vllm_api.model import (
    EncoderOnlyAttention,
    LinearBase,
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

# Bytes that packed weights may take in addition to plain ones, which is little for most encoders.
MOST_COPIES = 1 << 30


class PackedLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer with its packed weight."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self._weight, bias)


class EncoderLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer of an encoder with its packed weight or its plain one, whichever is faster."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        plain = cast(torch.Tensor, layer.weight)
        if plain_is_faster(self._weight, plain, x.numel() // self._weight.inputs):
            return linear(x, plain, bias)
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

    An encoder's steps are prompts. If torch's own product is faster for these, as on CPUs with vectors of 256 bits, its
    plain weights stay, and a large encoder's are not packed at all.
    """
    if multiplies_pairs() and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        # before packing, which decides by it whether a copy for oneDNN is needed
        learn_ways({Kind.PAIRS})
    is_encoder = any(isinstance(layer, EncoderOnlyAttention) for layer in model.modules())
    plain_weights = _linear_weights(model) if is_encoder else []
    keeps_plain = bool(plain_weights) and _prompts_want_plain(max(plain_weights, key=torch.Tensor.numel), compact)
    if keeps_plain and sum(weight.nbytes for weight in plain_weights) > MOST_COPIES:
        return PackedLayers(0, 0)
    weights: list[PackedWeight] = []
    for layer in model.modules():
        plain = _weight(layer)
        if plain is None:
            continue
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            weights.append(pack(plain, compact))
            layer.quant_method = (EncoderLinearMethod if keeps_plain else PackedLinearMethod)(weights[-1])
            if not keeps_plain:
                plain.data = plain.new_empty(0)
        elif isinstance(layer, ParallelLMHead) and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            weights.append(pack(plain, compact))
            layer.quant_method = PackedHeadMethod(weights[-1])
    learn_ways(kinds_of(weights))
    return PackedLayers(len(weights), sum(weight.compact is not None for weight in weights))


def _prompts_want_plain(plain: torch.Tensor, compact: bool) -> bool:
    """Returns whether torch multiplies many rows by this weight faster as it is."""
    weight = pack(plain, compact)
    learn_ways(kinds_of([weight]))
    return plain_is_faster(weight, plain, MEASURED_ROWS[-1])


def _linear_weights(model: nn.Module) -> list[torch.Tensor]:
    """Returns the plain weights of linear layers that can be packed."""
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    weights = (_weight(layer) for layer in layers if type(layer.quant_method) is UnquantizedLinearMethod)
    return [weight for weight in weights if weight is not None]


def _weight(layer: nn.Module) -> torch.Tensor | None:
    """Returns a layer's weight if it can be packed. A layer whose weight another layer has taken has none left; weights
    of convolutions have three dimensions.
    """
    plain = getattr(layer, "weight", None)
    if not isinstance(plain, torch.Tensor) or not plain.numel() or plain.dim() != 2 or not can_pack(plain):
        return None
    return plain
