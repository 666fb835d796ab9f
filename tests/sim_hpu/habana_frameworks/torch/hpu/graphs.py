"""`wrap_in_hpu_graph`: captures a callable once per key of its inputs, and replays it afterwards."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from habana_frameworks.torch.internal.bridge_config import compile_only
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.recipes import recipes
from habana_frameworks.torch.simulator.state import state
from habana_frameworks.torch.simulator.tape import Place, Tape, tensors_in

import torch

NAME = "wrap_in_hpu_graph"


@dataclass
class Graph:
    """A captured graph: its inputs (None if they are not kept), its outputs, which every replay overwrites."""

    tape: Tape
    inputs: list[torch.Tensor] | None
    input_serials: list[int | None]
    outputs: Any
    places: list[Place]


class GraphCache:
    """The graphs of one wrapped callable. Arguments as of `wrap_in_hpu_graph`."""

    def __init__(self, run: Callable[..., Any], disable_tensor_cache: bool, max_graphs: int | None) -> None:
        self._run = run
        self._disable_tensor_cache = disable_tensor_cache
        self._max_graphs = max_graphs
        self._graphs: dict[Any, Graph] = {}

    def clear(self) -> None:
        self._graphs.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bypass = kwargs.pop("bypass_hpu_graphs", False)
        kwargs.pop("warmup_mode", None)
        if bypass:
            card.bypasses += 1
            return self._run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            key = input_key((args, kwargs))
            inputs = tensors_in((args, kwargs))
        graph = self._graphs.get(key)
        if graph is not None:
            return _replay(graph, inputs)
        if self._max_graphs is not None and len(self._graphs) >= self._max_graphs:
            card.bypasses += 1
            return self._run(*args, **kwargs)
        graph = self._capture(args, kwargs, inputs)
        self._graphs[key] = graph
        return graph.outputs

    def _capture(self, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Graph:
        for tensor in inputs:
            if memory.serial(tensor) is None and tensor.dim() > 0:
                raise HpuConstraintError(NAME, f"an input of shape {tuple(tensor.shape)} is on the host")
        if memory.free() < card.bytes_per_capture:
            raise HpuConstraintError(
                NAME, f"out of memory: a graph takes {card.bytes_per_capture} bytes, {memory.free()} are free"
            )
        tape = Tape()
        with state.captured(NAME, tape) as stream:
            outputs = self._run(*args, **kwargs)
            recipe = stream.take()
        if recipe is not None:
            recipes.need(recipe)
        card.captures += 1
        places = tape.finish(tensors_in(outputs))
        serials = [memory.serial(tensor) for tensor in inputs]
        if self._disable_tensor_cache:
            tape.forget([serial for serial in serials if serial is not None])
        graph = Graph(tape, None if self._disable_tensor_cache else inputs, serials, outputs, places)
        memory.hold(graph, card.bytes_per_capture)
        return graph


def _replay(graph: Graph, inputs: list[torch.Tensor]) -> Any:
    """Launches the graph on other inputs, which it reads when it runs: later (see `LaunchQueue`).

    The result is the graph's own output tensors, overwritten: the same each time.
    """
    if state.region is not None:
        raise HpuConstraintError(NAME, f"a replay inside a region captured by {state.region}")
    state.cut()
    card.replays += 1
    if not compile_only():
        state.queue.launch(lambda: _compute(graph, inputs))
    return graph.outputs


def _compute(graph: Graph, inputs: list[torch.Tensor]) -> None:
    """What a replay does, when the card comes to it."""
    with torch._C.DisableTorchFunction(), state.make("host"):
        if graph.inputs is not None:
            for kept, given in zip(graph.inputs, inputs, strict=True):
                if kept is not given:
                    kept.copy_(given)
            bound = {}
        else:
            pairs = zip(graph.input_serials, inputs, strict=True)
            bound = {serial: given.untyped_storage() for serial, given in pairs if serial is not None}
        storages = graph.tape.replay(bound)
        for output, place in zip(tensors_in(graph.outputs), graph.places, strict=True):
            found = place.tensor(storages)
            if found.data_ptr() != output.data_ptr():
                output.copy_(found)


def input_key(value: Any, storages: dict[int, int] | None = None) -> Any:
    """What decides which graph is replayed: tensors by shape and view, everything else by value.

    Raises TypeError for what is not hashable (a plain dataclass), HpuConstraintError for a hashable object with
    tensors: the bridge would not give it the new ones.
    """
    storages = {} if storages is None else storages
    if isinstance(value, torch.Tensor):
        serial = memory.serial(value)
        base = None if serial is None else storages.setdefault(serial, len(storages))
        number = value.item() if serial is None and value.dim() == 0 else None
        return (value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), base, number)
    if isinstance(value, dict):
        return tuple((key, input_key(item, storages)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(input_key(item, storages) for item in value))
    hash(value)
    if is_dataclass(value) and any(tensors_in(getattr(value, field.name)) for field in fields(value)):
        raise HpuConstraintError(NAME, f"{type(value).__name__} holds tensors that a replay would not see; use a tuple")
    # 1, 1.0 and True are equal, but not the same recipe.
    return (type(value).__name__, value)


def wrap_in_hpu_graph(
    module: Any,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> Any:
    """Replaces a module's forward by one that captures and replays; a plain callable is wrapped.

    asynchronous, dry_run: make no difference here: a replay runs late, whatever is asked for.
    disable_tensor_cache: inputs are not kept; each replay reads the ones it is given where they are.
    max_graphs: beyond these, calls run without a graph.
    """
    if not isinstance(module, torch.nn.Module):
        cache = GraphCache(module, disable_tensor_cache, max_graphs)
        return functools.wraps(module)(lambda *args, **kwargs: cache(*args, **kwargs))
    cache = GraphCache(module.forward, disable_tensor_cache, max_graphs)
    module.forward = functools.wraps(module.forward)(lambda *args, **kwargs: cache(*args, **kwargs))
    module.clear_cache = cache.clear
    return module
