"""HPU graphs of lazy mode: the bridge captures by input shapes and replays. Source: Gaudi documentation, HPU Graphs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from vllm_gaudi_ucm.graphs.runners.base import Replay, StaticFunction


class HpuGraphRunner:
    """Wraps the function with `wrap_in_hpu_graph`.

    The bridge has a key of its own, made of the inputs: tensors by shape and view, Python scalars by value. Nested
    tuples are hashable for it and their tensors are bound again at every replay; plain dataclasses are not.
    """

    def __init__(self, function: StaticFunction) -> None:
        bridge = import_module("habana_frameworks.torch")
        self._mark_step = bridge.core.mark_step
        # the inputs are static already: caching copies of them would only cost memory
        self._graph = bridge.hpu.wrap_in_hpu_graph(_Module(function), disable_tensor_cache=True)

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        self._run(inputs)
        return partial(self._run, inputs)

    def _run(self, inputs: tuple[Any, ...]) -> None:
        # operators accumulated before must not become part of the graph
        self._mark_step()
        self._graph(*inputs)
        self._mark_step()


class _Module(nn.Module):
    """A function in the form of a module, which the bridge wraps."""

    def __init__(self, function: StaticFunction) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> None:
        self._function(*inputs)
