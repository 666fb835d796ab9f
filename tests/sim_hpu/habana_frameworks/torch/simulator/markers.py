"""Operators that only mark a graph: what Python asked for, where the graph of tensors on the CPU would not show it."""

import torch
from torch import Tensor

_library = torch.library.Library("sim_hpu", "DEF")


def define_markers() -> None:
    """Registers the operators; once per process."""
    _define("host_read(Tensor self) -> Tensor", torch.clone)
    _define("one_hot(Tensor self, SymInt num_classes) -> Tensor", _one_hot)


def _define(schema: str, kernel: object) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library._register_fake(name, kernel)


def _one_hot(self: Tensor, num_classes: int) -> Tensor:
    return (self[..., None] == torch.arange(num_classes, device=self.device)).long()
