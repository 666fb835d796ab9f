"""Files of Intel Neural Compressor for tiny models, and a plain computation with the same rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.engine.reference_model import ReferenceModel

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that are one module in an engine, and share their scales."""
SINGLE = ("o_proj", "down_proj")


def modules_of(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of an engine's linear modules, with the layers of Transformers that each has."""
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name in sorted(names):
        parent, _, own = name.rpartition(".")
        if own in SINGLE:
            yield name, (name,)
        for merged, parts in MERGED.items():
            if own == parts[0]:
                yield f"{parent}.{merged}", tuple(f"{parent}.{part}" for part in parts)


def measure(reference: ReferenceModel, prompts: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Nodes of the linear modules: the largest magnitudes of rows and weights."""
    model, largest = reference.model, dict[str, float]()

    def keep(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().amax().bfloat16()))

        return hook

    chosen = dict(modules_of(model))
    hooks = [model.get_submodule(parts[0]).register_forward_pre_hook(keep(name)) for name, parts in chosen.items()]
    for prompt in prompts:
        reference.logprobs(prompt, 1)
    for hook in hooks:
        hook.remove()
    found = {}
    for name, parts in chosen.items():
        weights = [cast(Tensor, model.get_submodule(part).weight).detach() for part in parts]
        weight = max(float(weight.abs().amax().bfloat16()) for weight in weights)
        found[name] = {"inputs": [[[largest[name]]]], "outputs": [], "params": {"weight": [[weight]]}}
    return found


class NarrowLinear(nn.Module):
    """The product of rows and a weight that were both rounded to 8-bit floats, in float64."""

    def __init__(self, weight: Tensor, rows: float, weights: Tensor, largest: float) -> None:
        """rows: the scale of rows. weights: of outputs, [outputs, 1] or a number."""
        super().__init__()
        self._rows, self._largest = rows, largest
        self._weight = self._rounded(weight, weights)

    def _rounded(self, x: Tensor, scale: Any) -> Tensor:
        codes = (x.double() / scale).clamp(-self._largest, self._largest).float().to(torch.float8_e4m3fn)
        return codes.double() * scale

    def forward(self, x: Tensor) -> Tensor:
        return (self._rounded(x, self._rows) @ self._weight.t()).to(x.dtype)


def power_of_two(number: Tensor, step: int = 1) -> Tensor:
    return 2.0 ** ((number.log2().ceil() / step).ceil() * step)


def round_linears(
    reference: ReferenceModel, nodes: Mapping[str, Any], card: str, by_channel: bool = False, ranks: int = 1
) -> None:
    """Replaces linear layers by products of rounded rows and weights: INC's maxabs_hw, or its method by channel.

    ranks: each has scales of its own part of a weight.
    """
    largest, step = {"GAUDI2": (240.0, 4), "GAUDI3": (448.0, 1)}[card]
    model = reference.model
    for name, parts in modules_of(model):
        rows = power_of_two(torch.tensor(nodes[name]["inputs"][0][0][0]) / (largest / 4), step)
        weights = [cast(Tensor, model.get_submodule(part).weight).data for part in parts]
        own = name.rpartition(".")[2]
        split = 1 if own in SINGLE else 0
        shards = [weight.chunk(ranks, split) for weight in weights]
        tops = [torch.stack([part[rank].abs().amax() for part in shards]).amax() for rank in range(ranks)]
        for part, pieces in zip(parts, shards, strict=True):
            scales = [
                power_of_two(maxima.bfloat16().float() / (largest / 2), 1 if by_channel else step).expand_as(piece)
                for piece, top in zip(pieces, tops, strict=True)
                for maxima in (piece.abs().amax(1, keepdim=True) if by_channel else top,)
            ]
            narrow = NarrowLinear(torch.cat(pieces, split), float(rows), torch.cat(scales, split).double(), largest)
            parent, _, layer = part.rpartition(".")
            setattr(cast(nn.Module, model.get_submodule(parent)), layer, narrow)
