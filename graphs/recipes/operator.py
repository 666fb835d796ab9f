"""What an operator's schema says about its place in a recipe."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch._ops import OpOverload

# Operators of these namespaces are nodes of a device's graph. Any other operator is someone's library operator, whose
# implementation runs operators of its own: those are what the device sees.
_NODES = frozenset(
    ("aten", "prim", "prims", "quantized", "mkldnn", "mkl", "onednn", "hpu", "c10d", "_c10d_functional", "inductor")
)
# Copies: name -> position of the source.
_COPIES = {"aten::_to_copy": 0, "aten::to": 0, "aten::copy_": 1, "aten::_copy_from": 0}
# What `x[...] = 1.0` becomes on CPU: the number arrives as a tensor without dimensions, on other devices as a scalar.
_LITERALS = frozenset(("aten::fill_", "aten::index_put_", "aten::_index_put_impl_"))


class Operator(NamedTuple):
    """Properties of one overload.

    name: with the overload, `aten.add.Tensor`.
    writes: some argument is written.
    metadata: only what the host knows of a tensor changes (`transpose_`, `detach_`); the device does nothing.
    library: defined by a library, and so replaced by what its implementation calls.
    source: position of what a copy copies, else None.
    literals: arguments without dimensions may be Python numbers in disguise.
    """

    name: str
    writes: bool
    metadata: bool
    library: bool
    source: int | None
    literals: bool


@cache
def operator_of(overload: OpOverload) -> Operator:
    """The properties of an overload; kept for good, since overloads are as many as the program has."""
    name = overload._schema.name
    metadata = torch.Tag.inplace_view in overload.tags or name == "aten::detach_" or overload.namespace == "prim"
    return Operator(
        str(overload),
        overload._schema.is_mutable,
        metadata,
        overload.namespace not in _NODES,
        _COPIES.get(name),
        name in _LITERALS,
    )
