"""Counts the operators of a region for Gaudi's graph compiler: traced and functionalised as by torch.compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

# The result of AOT autograd for a reshape that needs no copy.
_VIEWS = frozenset(("aten::_unsafe_view", "aten::alias", "aten::detach"))


@dataclass(frozen=True)
class NodeCount:
    """operators: nodes that compute or copy, by name. views: nodes that change a shape alone.

    peak: most bytes of tensors that operators have made and that are still to be read, at one time. A compiler that
        fuses operators needs less.
    """

    operators: Counter[str]
    views: int
    peak: int

    @property
    def num_operators(self) -> int:
        return self.operators.total()

    @property
    def num_nodes(self) -> int:
        """All calls, views among them."""
        return self.num_operators + self.views


def count_nodes(run: Callable[..., Any], *args: Any) -> NodeCount:
    """The nodes of `run(*args)`; composite operators in pieces, writes to inputs as copies at the end.

    args: any nesting of tensors in tuples, lists and dicts; `meta` tensors cost nothing. Python numbers are constants.
    """
    leaves, structure = tree_flatten(args)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        found = run(*tree_unflatten(filled, structure))
        return [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]

    # otherwise make_fx has a mode of its own for each node, with the text of the whole stack
    shared = TracingContext(FakeTensorMode())
    with torch.inference_mode(False), torch.no_grad(), tracing(shared):
        functional = torch.func.functionalize(of_tensors, remove="mutations")
        graph = make_fx(functional)(*(leaves[place] for place in places)).graph
    graph.eliminate_dead_code()
    return count_graph(graph)


def count_graph(graph: torch.fx.Graph) -> NodeCount:
    """The nodes of a functional graph of operators."""
    operators: Counter[str] = Counter()
    views = 0
    lives = _Lives()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            lives.alias(node)  # inputs, results, and items of a tuple
        elif node.target.is_view or node.target._schema.name in _VIEWS:
            views += 1
            lives.alias(node)
        else:
            operators[node.target._schema.name] += 1
            lives.make(node)
    return NodeCount(operators, views, lives.peak())


class _Lives:
    """The first and last node of each tensor's life. Views live as long as their base."""

    def __init__(self) -> None:
        self._maker: dict[torch.fx.Node, torch.fx.Node] = {}
        self._bytes: dict[torch.fx.Node, int] = {}
        self._last_read: dict[torch.fx.Node, int] = {}
        self._count = 0

    def make(self, node: torch.fx.Node) -> None:
        self._read(node)
        made = [one for one in tree_flatten(node.meta.get("val"))[0] if isinstance(one, torch.Tensor)]
        self._maker[node] = node
        self._bytes[node] = sum(one.numel() * one.element_size() for one in made)
        self._last_read[node] = self._count
        self._count += 1

    def alias(self, node: torch.fx.Node) -> None:
        """Registers an alias, which neither reads nor makes a tensor; inputs have no maker."""
        self._read(node)
        makers = [self._maker[one] for one in node.all_input_nodes if one in self._maker]
        if makers:
            self._maker[node] = makers[0]

    def peak(self) -> int:
        change = [0] * (self._count + 1)
        for place, node in enumerate(self._bytes):
            change[place] += self._bytes[node]
            change[min(self._last_read[node], self._count - 1) + 1] -= self._bytes[node]
        return max(accumulate(change), default=0)

    def _read(self, node: torch.fx.Node) -> None:
        for one in node.all_input_nodes:
            if one in self._maker:
                self._last_read[self._maker[one]] = self._count
