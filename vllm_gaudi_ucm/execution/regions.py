"""Compiles a model in regions one by one: each decoder layer, and the modules before and after the layers.

All layers with the same kinds of weights share a region, and so one graph for each bucket: compiling costs the same
whatever the number of layers. Values that differ between layers must not be Python values; see `NamelessAttention` for
the names of layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_gaudi_ucm.vllm_api.model import (
    AttentionLayerBase,
    PPMissingLayer,
    RMSNorm,
    VocabParallelEmbedding,
    forget_names,
    plain_parameters,
)

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler

# Arguments that vLLM's models pass to a layer: tensors, and None for the first layer's residual.
TENSOR_ARGUMENTS = frozenset({"positions", "position_ids", "hidden_states", "residual", "embeds"})
# Modules outside the layers; classes that read only their inputs and weights.
SMALL_REGIONS = (VocabParallelEmbedding, RMSNorm, nn.LayerNorm, nn.Embedding)


def layer_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the decoder layers on this stage: the outermost lists of modules that all hold attention.

    Raises:
        ValueError: the layers cannot be compiled one by one; the message says why.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _are_layers(module)]
    in_layers = {id(module) for layers in lists for layer in layers for module in layer.modules()}
    outside = [name for name, module in model.named_modules() if _is_attention(module) and id(module) not in in_layers]
    if not lists or outside:
        raise ValueError(f"attention outside of a list of layers: {', '.join(outside) or 'all of it'}")
    for layers in lists:
        for kind in {type(layer) for layer in _present(layers)}:
            others = [name for name in _required(kind) if name not in TENSOR_ARGUMENTS]
            if others:
                raise ValueError(f"{kind.__name__}.forward takes {', '.join(others)}, which may be no tensors")
    outermost = (layers for layers in lists if not any(id(layers) in _inside(other) for other in lists))
    return [_present(layers) for layers in outermost]


def compile_regions(model: nn.Module, compiler: StaticCompiler, others: tuple[type[nn.Module], ...] = ()) -> int:
    """Replaces the forward of each layer by the shared region, and also those of embeddings and norms outside the
    layers.

    others: further classes of modules outside the layers; modules in them belong to their regions.

    Returns the number of layers.

    Raises:
        ValueError: the layers cannot be compiled one by one; the model is unchanged.
    """
    lists = layer_lists(model)
    forget_names(model)
    plain_parameters(model)
    layers = [layer for each in lists for layer in each]
    inside = {id(module) for layer in layers for module in layer.modules()}
    run_layers: dict[object, Callable[..., Any]] = {}
    run_part = compiler.region(_run_part)
    for layer in layers:
        held = _weights_held(layer)
        if held not in run_layers:
            number = len(run_layers)
            run_layers[held] = compiler.region(_own_copy(_run_layer, number) if number else _run_layer)
        layer.forward = _layer_call(run_layers[held], layer)
    for module in model.modules():
        if isinstance(module, (*others, *SMALL_REGIONS)) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            module.forward = _part_call(run_part, module)
    return len(layers)


def _run_layer(layer: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    return type(layer).forward(layer, **inputs)


def _weights_held(layer: nn.Module) -> tuple[object, ...]:
    """Returns the names and dtypes of a layer's weights: a different quantisation needs another graph."""
    return type(layer), *((name, weight.dtype) for name, weight in layer.named_parameters())


def _own_copy(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Returns the same code as another object, because torch.compile keeps separate graphs for each object.

    Graphs of one object are distinguished by guards, and the choice of guards that are skipped later
    (`StaticCompiler.skip_guards`) assumes that modules have the same parameters.
    """
    name = f"{function.__name__}_{number}"
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def _run_part(module: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
    return type(module).forward(module, *inputs, **named)


def _layer_call(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    names = list(inspect.signature(type(layer).forward).parameters)[1:]

    def call(*given: Any, **named: Any) -> Any:
        inputs = {**dict(zip(names, given, strict=False)), **named}
        # the first layer of an EAGLE head has no norm that would add
        adds = not isinstance(getattr(layer, "input_layernorm", None), nn.Identity)
        if adds and "residual" in inputs and inputs["residual"] is None:
            # adding zeros does not change values, and the first layer then shares the graph of the others
            inputs["residual"] = torch.zeros_like(inputs["hidden_states"])
        return region(layer, inputs)

    return call


def _part_call(region: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return lambda *inputs, **named: region(module, *inputs, **named)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, AttentionLayerBase)


def _present(modules: nn.ModuleList) -> list[nn.Module]:
    """Returns the modules without placeholders for layers of other pipeline stages."""
    return [module for module in modules if not isinstance(module, PPMissingLayer)]


def _are_layers(modules: nn.ModuleList) -> bool:
    layers = _present(modules)
    return bool(layers) and all(any(_is_attention(part) for part in layer.modules()) for layer in layers)


def _required(kind: type[nn.Module]) -> Iterator[str]:
    """Yields the names of the arguments of a class's forward that have no default."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL or (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ):
            yield parameter.name


def _inside(layers: nn.ModuleList) -> set[int]:
    return {id(part) for layer in layers for part in layer.modules()}
