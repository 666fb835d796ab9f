"""How tensors and parts of a step are named where there are several KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Parts = tuple[str, ...]


def group_suffix(number: int) -> str:
    """What the names of a KV-cache group's tensors and parts end with; number: its place among the groups."""
    return f".{number}" if number else ""


def of_group(tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The tensors of one group by their plain names, and those that all groups have."""
    if not number:
        return {name: tensor for name, tensor in tensors.items() if "." not in name}
    end = group_suffix(number)
    own = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
    common = {name: tensors[name] for name in ("positions", "groups", "tiles") if name in tensors}
    return {**common, **own}
