"""The protocol of graph runners, and the eager one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

StaticFunction = Callable[..., None]
"""A function of static tensors. Its results stay in tensors that outlive it: a graph returns nothing."""


Replay = Callable[[], None]
"""Executes a graph on the current contents of its inputs."""


class GraphRunner(Protocol):
    """Makes graphs of one function at static shapes."""

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        """Executes the function, and returns its graph for these inputs.

        A graph reads fixed memory: its inputs are the same tensors in every replay, with other contents. They may be
        nested in tuples; anything but a tensor is part of the graph.
        """


class EagerRunner:
    """Calls the function."""

    def __init__(self, function: StaticFunction) -> None:
        self._function = function

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        self._function(*inputs)
        return partial(self._function, *inputs)
