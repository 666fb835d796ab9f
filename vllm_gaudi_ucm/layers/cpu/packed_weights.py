"""Packs a loaded model's linear layers for the CPU, by replacing the method object of each vLLM layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import linear

from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PackedWeight, can_pack, multiplies_pairs, pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, learn_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind
from vllm_gaudi_ucm.vllm_api.model import (
    EncoderOnlyAttention,
    LinearBase,
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

# Rows of a step of an encoder with one prompt of usual length, and how often its product is measured each way.
ENCODER_ROWS, REPEATS = 128, 7
# How much faster torch's own product has to be.
WORTH_PLAIN = 1.05
# Rows for which packed weights are faster all the same: with 16 a model took 12.5 ms, and 13.6 with plain weights.
FEW_ROWS = 32
# Bytes that packed weights may take in addition to plain ones, which is little for most encoders.
MOST_COPIES = 1 << 30


class PackedLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer with its packed weight."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self._weight, bias)


class EncoderLinearMethod(UnquantizedLinearMethod):
    """Computes a linear layer of an encoder with its packed weight for few rows, and its plain weight for more."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.numel() <= FEW_ROWS * self._weight.inputs:
            return packed_linear(x, self._weight, bias)
        return linear(x, cast(torch.Tensor, layer.weight), bias)


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

    An encoder's steps are prompts. If torch's own product is faster for one of usual length, as on CPUs with vectors of
    256 bits, its plain weights stay, and a large encoder's are not packed at all.
    """
    is_encoder = any(isinstance(layer, EncoderOnlyAttention) for layer in model.modules())
    keeps_plain = is_encoder and plain_is_faster(model, compact)
    if keeps_plain and sum(weight.nbytes for weight in _linear_weights(model)) > MOST_COPIES:
        return PackedLayers(0, 0)
    weights: list[PackedWeight] = []
    if multiplies_pairs() and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        # before packing, which decides by it whether a copy for oneDNN is needed
        learn_ways({Kind.PAIRS})
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


def plain_is_faster(model: nn.Module, compact: bool) -> bool:
    """Returns whether torch multiplies the largest linear layer of a model faster as it is, by a quick measurement."""
    if not (weights := _linear_weights(model)):
        return False
    plain = max(weights, key=torch.Tensor.numel).detach()
    packed, rows = pack(plain, compact), torch.ones((ENCODER_ROWS, plain.shape[1]), dtype=plain.dtype)
    ways = (lambda: packed_linear(rows, packed), lambda: linear(rows, plain))
    # in turn, so that other work on the machine disturbs both; the fastest of each counts
    seconds = [[_seconds(way) for way in ways] for _ in range(REPEATS)]
    of_packed, of_plain = (min(times) for times in zip(*seconds, strict=True))
    return of_packed > WORTH_PLAIN * of_plain


def _seconds(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


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
