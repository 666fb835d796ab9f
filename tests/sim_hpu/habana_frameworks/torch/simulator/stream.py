"""The operators of one recipe, as a digest: two recipes are the same if and only if their streams are.

Names, data flow, shapes, strides, dtypes and Python scalars are part of it; the contents of tensors are not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from habana_frameworks.torch.simulator.memory import memory

import torch


class Recipe(NamedTuple):
    """What operators are compiled into: their digest and their number."""

    key: str
    operators: int


class Stream:
    """Operators since the last cut. Storages are numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self.length = 0

    def add(self, name: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Appends an operator. Its results are known by the storages in which later operators find them."""
        self._digest.update(f"{name}{self._describe(args)}{self._describe(kwargs)}\n".encode())
        self.length += 1

    def results(self, tensors: Sequence[torch.Tensor]) -> None:
        """Numbers the storages that the operator made."""
        for tensor in tensors:
            serial = memory.serial(tensor)
            if serial is not None:
                self._number(serial)

    def take(self) -> Recipe | None:
        """The recipe of all operators since the last call, None where there were none."""
        recipe = Recipe(self._digest.hexdigest(), self.length) if self.length else None
        self._clear()
        return recipe

    def _number(self, serial: int) -> int:
        return self._numbers.setdefault(serial, len(self._numbers))

    def _describe(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value)
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._describe(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._describe, value)) + "]"
        if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.memory_format):
            return repr(value)
        return type(value).__name__

    def _describe_tensor(self, tensor: torch.Tensor) -> str:
        kind = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"
        serial = memory.serial(tensor)
        if serial is not None:
            return f"t{self._number(serial)}+{tensor.storage_offset()}:{kind}"
        # A number that lives on the host is compiled into the recipe; a larger tensor is copied to the card first.
        return f"h{kind}={tensor.item()}" if tensor.dim() == 0 else f"h{kind}"
