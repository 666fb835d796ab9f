"""A model in regions that are compiled one by one: each decoder layer, and what stands before and behind them.

All layers of one class share a region, hence one graph for each bucket: compiling costs the same whatever the number
of layers. Nothing that differs between layers may be a Python value; see `NamelessAttention` for their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_gaudi_ucm.vllm_api.model import Attention, RMSNorm, VocabParallelEmbedding, forget_names

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler

# What vLLM's models hand to a layer: tensors, and None for the first layer's residual.
TENSOR_ARGUMENTS = frozenset({"positions", "position_ids", "hidden_states", "residual"})
# Beside the layers; classes that read nothing but their inputs and weights.
SMALL_REGIONS = (VocabParallelEmbedding, RMSNorm, nn.LayerNorm, nn.Embedding)


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The model's decoder layers: its outermost lists of modules that all hold attention.

    Raises:
        ValueError: the layers cannot be compiled one by one; the message says why.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _are_layers(module)]
    in_layers = {id(module) for layers in lists for layer in layers for module in layer.modules()}
    outside = [name for name, module in model.named_modules() if _is_attention(module) and id(module) not in in_layers]
    if not lists or outside:
        raise ValueError(f"attention outside of a list of layers: {', '.join(outside) or 'all of it'}")
    for layers in lists:
        for kind in {type(layer) for layer in layers}:
            others = [name for name in _required(kind) if name not in TENSOR_ARGUMENTS]
            if others:
                raise ValueError(f"{kind.__name__}.forward takes {', '.join(others)}, which may be no tensors")
    return [layers for layers in lists if not any(id(layers) in _inside(other) for other in lists)]


def compile_regions(model: nn.Module, compiler: StaticCompiler) -> int:
    """Replaces the forward of each layer by the region that they share, and those of embeddings and norms outside.

    Returns the number of layers.

    Raises:
        ValueError: the layers cannot be compiled one by one; the model is as it was.
    """
    lists = layer_lists(model)
    forget_names(model)
    layers = [layer for each in lists for layer in each]
    inside = {id(module) for layer in layers for module in layer.modules()}
    run_layer, run_part = compiler.region(_run_layer), compiler.region(_run_part)
    for layer in layers:
        layer.forward = _layer_call(run_layer, layer)
    for module in model.modules():
        if isinstance(module, SMALL_REGIONS) and id(module) not in inside:
            module.forward = _part_call(run_part, module)  # type: ignore[method-assign]
    return len(layers)


def _run_layer(layer: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    return type(layer).forward(layer, **inputs)


def _run_part(module: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
    return type(module).forward(module, *inputs, **named)


def _layer_call(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    names = list(inspect.signature(type(layer).forward).parameters)[1:]

    def call(*given: Any, **named: Any) -> Any:
        inputs = {**dict(zip(names, given, strict=False)), **named}
        if "residual" in inputs and inputs["residual"] is None:
            # adding zeros changes no value, and the first layer is one with the others
            inputs["residual"] = torch.zeros_like(inputs["hidden_states"])
        return region(layer, inputs)

    return call


def _part_call(region: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return lambda *inputs, **named: region(module, *inputs, **named)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, Attention)


def _are_layers(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(any(_is_attention(part) for part in module.modules()) for module in modules)


def _required(kind: type[nn.Module]) -> Iterator[str]:
    """Names of the arguments of a class's forward that have no default."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL or (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ):
            yield parameter.name


def _inside(layers: nn.ModuleList) -> set[int]:
    return {id(part) for layer in layers for part in layer.modules()}
