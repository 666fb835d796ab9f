"""`torch.compile` with static shapes: `hpu_backend` in Gaudi's compile mode, inductor elsewhere."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from vllm_gaudi_ucm.graphs.graph_runner.base import StaticFunction

# One entry per bucket is what static shapes mean; dynamo's default of 8 would send the ninth bucket to eager mode.
MOST_SHAPES = 4096


class CompiledRunner:
    """Compiles the function for each key; dynamo finds the graph of a key by its shapes.

    Args:
        function: what is compiled.
        backend: dynamo's name of it, `hpu_backend` or `inductor`.
        options: of the backend.
    """

    def __init__(self, function: StaticFunction, backend: str, options: dict[str, Any] | None = None) -> None:
        torch._dynamo.config.recompile_limit = MOST_SHAPES
        torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES
        self._compiled = torch.compile(function, backend=backend, dynamic=False, options=options)
        self._keys: set[Hashable] = set()

    def capture(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        # twice: a first call may still trace differently than the second (lazily made buffers)
        self._compiled(*inputs)
        self._compiled(*inputs)
        self._keys.add(key)

    def replay(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        if key not in self._keys:
            raise KeyError(key)
        self._compiled(*inputs)

    def captured(self) -> int:
        return len(self._keys)
