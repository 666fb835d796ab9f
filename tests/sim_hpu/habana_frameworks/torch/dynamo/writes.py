"""What a region writes to its inputs, and what that costs: one pattern is done in place, all else copies the target.

Functionalised, a write is a chain of operators that make a new tensor, and a `copy_` to the input in the end. The
bridge re-inplaces `index_copy` whose target is the input itself (no view of it) with these two users alone, and whose
result no eager node uses. Source: the bridge's pass_reinplace_index_copy_ops.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

COPY = torch.ops.aten.copy_.default
_INDEX_COPY = torch.ops.aten.index_copy.default
# A part of a view is written, and then the view into what it is a view of: their second argument.
_VIEW_SCATTERS = frozenset({"slice_scatter", "select_scatter", "as_strided_scatter", "diagonal_scatter"})
_PARTS = _VIEW_SCATTERS | {
    *("index_put", "_unsafe_index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_fill"),
    *("masked_scatter", "index_reduce"),
}


class Charge(NamedTuple):
    """A write that copies its whole target: which duty says so, the operator, and why."""

    duty: int
    operator: str
    target: Node
    why: str


class Writes(NamedTuple):
    """free: `index_copy` nodes done in place. charges: the others. copies: the final `copy_` nodes, by their target."""

    free: frozenset[Node]
    charges: tuple[Charge, ...]
    copies: dict[Node, Node]


def find_writes(graph: Graph, eager: Collection[Node], *, inplace_index_copy: bool) -> Writes:
    """eager: nodes that run outside of clusters."""
    free, charges, copies = set(), [], {}
    for copy in graph.nodes:
        if copy.target is not COPY or copy.args[0].op != "placeholder":
            continue
        target = copy.args[0]
        copies[target] = copy
        for writer in _writers(copy.args[1], target):
            if writer.target is not _INDEX_COPY:
                charges.append(Charge(13, str(writer.target), target, "a write to a part of an input clones all of it"))
                continue
            why = _not_free(writer, copy, target, eager) if inplace_index_copy else "use_inplace_index_copy is off"
            if why is None:
                free.add(writer)
            else:
                charges.append(Charge(12, str(writer.target), target, why))
    return Writes(frozenset(free), tuple(charges), copies)


def _writers(value: object, target: Node) -> list[Node]:
    """The writers that a new value of `target` went through, from the last to the first."""
    if not isinstance(value, Node) or not isinstance(value.target, OpOverload):
        return []
    is_writer = value.target is _INDEX_COPY or _name(value) in _PARTS
    if not is_writer and not value.target.is_view:
        return []
    sources = value.args[:2] if _name(value) in _VIEW_SCATTERS else value.args[:1]
    found = [value] if is_writer and _root(value) is target else []
    return found + [writer for source in sources for writer in _writers(source, target)]


def _root(node: Node) -> object:
    """What a chain of writes and views begins with."""
    found: object = node
    while isinstance(found, Node) and isinstance(found.target, OpOverload):
        if not (found.target.is_view or found.target is _INDEX_COPY or _name(found) in _PARTS):
            break
        found = found.args[0]
    return found


def _name(node: Node) -> str:
    return node.target._schema.name.rpartition("::")[2] if isinstance(node.target, OpOverload) else ""


def _not_free(writer: Node, copy: Node, target: Node, eager: Collection[Node]) -> str | None:
    """Why an `index_copy` is not done in place, None where it is."""
    if writer.args[0] is not target:
        return "its target is a view or a result, not an input of the region"
    if copy.args[1] is not writer:
        return "its result is changed once more before it is the input's"
    others = [user for user in target.users if user not in (writer, copy)]
    if others:
        return f"its target has other users ({', '.join(str(user.target) for user in others[:3])}); read the result"
    if any(user in eager for user in writer.users):
        return "an eager node uses its result"
    return None
