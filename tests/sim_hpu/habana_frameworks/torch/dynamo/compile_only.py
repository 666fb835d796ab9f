"""A region under PT_COMPILE_ONLY_MODE: recipes are compiled for the shapes that would come, nothing is computed."""

from collections.abc import Callable, Sequence
from typing import Any

from habana_frameworks.torch.dynamo.clusters import Cluster, describe
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

Need = Callable[[Cluster, Sequence[Any]], None]


def leave_garbage(parts: Sequence[Cluster | Node], outputs: Sequence[Any], values: dict[Node, Any], need: Need) -> Any:
    """Walks over shapes alone. Returns outputs of the right shapes that hold garbage (duty 22).

    values: of inputs and constants. need: told of each cluster and its inputs, which have shapes and no contents.
    """
    nodes = [node for part in parts for node in (part.nodes if isinstance(part, Cluster) else (part,))]
    fakes = _of_tracing(nodes, values) or _walk(nodes, values)
    for part in parts:
        if isinstance(part, Cluster):
            need(part, [fakes[node] for node in part.inputs])
    results = []
    for node in outputs:
        if not isinstance(node, Node) or not isinstance(fakes[node], Tensor):
            results.append(fakes.get(node, node) if isinstance(node, Node) else node)
        else:
            results.append(values[node] if node in values else _garbage_like(fakes[node]))
    return results


def _of_tracing(nodes: Sequence[Node], values: dict[Node, Any]) -> dict[Node, Any] | None:
    """Shapes that the graph was traced with, where these inputs are like those of then, and no size is a symbol."""
    traced = {node: node.meta.get("val") for node in (*values, *nodes)}
    if any(_is_open(value) for value in traced.values()):
        return None
    if any(describe(traced[node]) != describe(value) for node, value in values.items()):
        return None
    return {**traced, **values}


def _is_open(value: Any) -> bool:
    """Whether tracing does not say what it is."""
    if isinstance(value, tuple | list):
        return any(map(_is_open, value))
    if isinstance(value, Tensor):
        return value._has_symbolic_sizes_strides
    return not isinstance(value, bool | int | float)


def _walk(nodes: Sequence[Node], values: dict[Node, Any]) -> dict[Node, Any]:
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = {
            node: mode.from_tensor(value) if isinstance(value, Tensor) else value for node, value in values.items()
        }
        with mode:
            for node in nodes:
                args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda value: fakes[value])
                fakes[node] = node.target(*args, **kwargs)
    return fakes


def _garbage_like(fake: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        memory.put(made)
        if duties.on(22):
            garbage.fill(made)
    return made
