"""Which nodes of a region the card does not take: they leave the cluster, run eagerly, and cut the region in two.

Source: the bridge's dynamo/compile_backend/{shared_layer,passes}.py and _passes/pattern_rewriter.py.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from habana_frameworks.torch.simulator.rules import NAMESPACES, has_dynamic_shape, named_arguments

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

_ALWAYS = frozenset(
    {"nonzero", "nonzero_static", "_unique2", "unique_dim", "unique_consecutive", "bincount", "addcmul"}
)
_BOOL_SCALARS = frozenset({"full", "mul"})
_CONTROL_FLOW = frozenset({"cond", "while_loop"})
_INDEX = frozenset({"index", "_unsafe_index"})
_INDEX_PUT = frozenset({"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})


def find_fallbacks(nodes: list[Node], *, static: bool) -> dict[Node, tuple[int, str]]:
    """Nodes that run eagerly: the number of the duty that says so, and why.

    static: recipes are compiled for true sizes (`force_static_compile`), whatever dynamo makes symbolic.
    """
    found = {node: reason for node in nodes if (reason := _reason(node, static)) is not None}
    for node in reversed(nodes):
        if node not in found and _is_view(node) and node.users and all(user in found for user in node.users):
            found[node] = (10, "a view whose users are eager")
    return found


def _reason(node: Node, static: bool) -> tuple[int, str] | None:
    if isinstance(node.target, HigherOrderOperator):
        return _higher_order(node)
    if not isinstance(node.target, OpOverload):
        return None
    name = node.target._schema.name.rpartition("::")[2]
    if node.target.namespace not in NAMESPACES:
        return 11, "an opaque operator has no lowering; write it in ATen"
    if "sdpa" in name or "scaled_dot_product" in name:
        return (9, "symbolic sizes, without force_static_compile") if not static and is_dynamic(node) else None
    for rule in _RULES:
        reason = rule(node, name)
        if reason:
            return 10, reason
    return None


def _higher_order(node: Node) -> tuple[int, str]:
    name = str(node.target)
    if name in _CONTROL_FLOW:
        return 10, "control flow inside of a region"
    return 11, "an opaque operator has no lowering; write it in ATen"


def _listed(node: Node, name: str) -> str | None:
    return "on the list of operators that run eagerly" if name in _ALWAYS else None


def _shape_of_data(node: Node, name: str) -> str | None:
    func = node.target
    if not isinstance(func, OpOverload) or name in _INDEX | _INDEX_PUT:
        return None
    return has_dynamic_shape(func, named_arguments(func, node.args, node.kwargs))


def _indexed(node: Node, name: str) -> str | None:
    if name not in _INDEX and name not in _INDEX_PUT:
        return None
    indices: Any = node.args[1]
    if any(index is None for index in indices):
        return "an index that is not leading (`x[:, i]`); use index_select"
    if any(_value(index).dtype in (torch.bool, torch.uint8) for index in indices):
        return "boolean-mask indexing"
    if any(map(_is_symbolic, indices)):
        return "an index of symbolic size; use index_select"
    if name in _INDEX_PUT and is_dynamic(node):
        return "symbolic sizes"
    return None


def _permuted_int64(node: Node, name: str) -> str | None:
    moved = name in ("permute", "transpose", "t")
    return "permute of int64" if moved and _value(node.args[0]).dtype == torch.int64 else None


def _literals(node: Node, name: str) -> str | None:
    scalars = list(_scalars((node.args, node.kwargs)))
    if any(isinstance(scalar, float) and math.isnan(scalar) for scalar in scalars):
        return "a NaN literal"
    return (
        "a Python bool"
        if name in _BOOL_SCALARS and any(arg in (True, False) and isinstance(arg, bool) for arg in node.args[1:])
        else None
    )


def _copied_from_host(node: Node, name: str) -> str | None:
    return "a constant of the host, copied to the card" if name.startswith("lift_fresh") else None


_RULES: tuple[Callable[[Node, str], str | None], ...] = (
    _listed,
    _shape_of_data,
    _indexed,
    _permuted_int64,
    _literals,
    _copied_from_host,
)


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _scalars(item)
    elif isinstance(value, bool | int | float):
        yield value


def is_dynamic(node: Node) -> bool:
    """Whether a tensor that the node reads or makes has a symbolic size."""
    return _is_symbolic(node) or any(map(_is_symbolic, node.all_input_nodes))


def _is_symbolic(node: Node) -> bool:
    values = node.meta.get("val")
    tensors = values if isinstance(values, list | tuple) else (values,)
    sizes = (size for tensor in tensors if isinstance(tensor, torch.Tensor) for size in tensor.shape)
    return any(not isinstance(size, int) for size in sizes)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
