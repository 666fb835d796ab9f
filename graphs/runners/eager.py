"""No graphs: static shapes, executed operator by operator. For a CPU, and for finding what a graph would hide."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vllm_gaudi_ucm.graphs.runners.base import StaticFunction


class EagerRunner:
    """Calls the function; keeps the keys, so that a shape that was never warmed is an error here as on a device."""

    def __init__(self, function: StaticFunction) -> None:
        self._function = function
        self._keys: set[Hashable] = set()

    def capture(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        self._function(*inputs)
        self._keys.add(key)

    def replay(self, key: Hashable, inputs: tuple[Any, ...]) -> None:
        if key not in self._keys:
            raise KeyError(key)
        self._function(*inputs)

    def captured(self) -> int:
        return len(self._keys)
