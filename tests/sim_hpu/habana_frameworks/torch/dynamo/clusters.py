"""A region cut into what is launched: clusters of nodes, each one recipe for given inputs, and eager nodes between."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from habana_frameworks.torch.simulator.stream import Recipe

import torch
from torch._ops import OpOverload
from torch.fx import Node

Sizes = tuple[Any, ...]


class Cluster:
    """Consecutive nodes that run as one recipe: the bridge's graph module, with its single slot for a recipe."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        inside = set(nodes)
        used = (value for node in nodes for value in node.all_input_nodes if value not in inside)
        self.inputs = list(dict.fromkeys(used))
        self.operators = sum(isinstance(node.target, OpOverload) and not node.target.is_view for node in nodes)
        self._digest = _digest(nodes, self.inputs)
        self._before: Sizes | None = None

    def recipe(self, values: Sequence[Any]) -> Recipe:
        """The recipe for these inputs: sizes, strides, storage offsets and dtypes of tensors, values of numbers."""
        described = repr([describe(value) for value in values])
        return Recipe(hashlib.blake2b((self._digest + described).encode(), digest_size=16).hexdigest(), self.operators)

    def changes_shape(self, values: Sequence[Any], *, static: bool) -> bool:
        """Whether this call finds the slot empty or, with static compilation, of other sizes or strides."""
        sizes = tuple((tuple(value.shape), value.stride()) for value in values if isinstance(value, torch.Tensor))
        before, self._before = self._before, sizes
        return before is None or (static and before != sizes)


def cut(nodes: Sequence[Node], eager: Collection[Node]) -> list[Cluster | Node]:
    """Clusters and eager nodes, in the order in which they run."""
    parts: list[Cluster | Node] = []
    waiting: list[Node] = []
    for node in nodes:
        if node not in eager:
            waiting.append(node)
            continue
        if waiting:
            parts.append(Cluster(waiting))
        waiting = []
        parts.append(node)
    return [*parts, Cluster(waiting)] if waiting else parts


def describe(value: Any) -> Any:
    """What the bridge looks at of an input."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    return value if isinstance(value, bool | int | float) else type(value).__name__


def _digest(nodes: Sequence[Node], inputs: Sequence[Node]) -> str:
    """Of operators, data flow and constants; and of which results are used outside."""
    numbers = {node: index for index, node in enumerate([*inputs, *nodes])}
    digest = hashlib.blake2b(digest_size=16)
    inside = set(nodes)
    for node in nodes:
        leaves = any(user not in inside for user in node.users)
        arguments = _text((node.args, node.kwargs), numbers)
        digest.update(f"{node.target}{arguments}{leaves}\n".encode())
    return digest.hexdigest()


def _text(value: Any, numbers: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(item, numbers)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, numbers) for item in value) + "]"
    return str(value)
