"""What one recorded region was, and what to say about it when it is new."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Values that a device compiles into a recipe. Their repr is unambiguous: 1, 1.0 and True differ.
_BY_VALUE = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)


def describe(value: object, tensors: list[Tensor]) -> str:
    """Text of one argument, containers recursed; the tensors in it are appended to `tensors` in order of appearance.

    Tensors by type, shape, view and device type, never by data; numbers and strings by value; anything else (a
    generator, a process group) by its type, because a device takes its state as data.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return describe_tensor(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join([describe(item, tensors) for item in value])}]"
    if isinstance(value, dict):
        return f"{{{', '.join([f'{key}={describe(item, tensors)}' for key, item in value.items()])}}}"
    if isinstance(value, _BY_VALUE):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    return f"<{type(value).__qualname__}>"


def describe_tensor(tensor: Tensor) -> str:
    """`float32[4, 6]@cpu`, with strides and storage offset where the tensor is not its whole memory in order."""
    if tensor.layout is not torch.strided:
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.layout}@{tensor.device.type}"
    return _text(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device)


def tensors_in(result: object) -> Iterator[Tensor]:
    """The tensors that an operator returned; numbers it returned are data and no part of a recipe."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_in(item)


# Writing the text costs more than all else; a step has few different tensors. A shape that fell out is written again.
@lru_cache(maxsize=16384)
def _text(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int, device: torch.device) -> str:
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    in_order, step = [], 1
    for size in reversed(shape):
        in_order.append(step)
        step *= size
    if stride != tuple(reversed(in_order)):
        text += f"strides{list(stride)}"
    return f"{text}{f'+{offset}' if offset else ''}@{device.type}"


class Recipe(NamedTuple):
    """The operators of a region.

    label: whose region it was. digest: 16 bytes, equal for regions that a device would compile to one recipe.
    operators: how many there were. first_at: text of each different operator -> position of its first occurrence.
    inputs: texts of the first tensors that came from outside.
    """

    label: str
    digest: bytes
    operators: int
    first_at: dict[str, int]
    inputs: tuple[str, ...]


class NewRecipe(NamedTuple):
    """A recipe that was first seen after warm-up.

    label, operators, inputs: as in `Recipe`.
    new_operators: the first few (position, text) of operators that no recipe before it has.
    new_operator_count: how many different ones those are; 0 means that known operators came in another order, or with
        another flow of data.
    """

    label: str
    operators: int
    inputs: tuple[str, ...]
    new_operators: tuple[tuple[int, str], ...]
    new_operator_count: int

    def __str__(self) -> str:
        what = f"recipe {self.label!r} of {self.operators} operators was first seen after warm-up"
        inputs = f"; its inputs begin with {', '.join(self.inputs) or 'none'}"
        if not self.new_operator_count:
            return f"{what}: each operator is known, but not in this order or with this flow of data{inputs}"
        named = "; ".join(f"operator {position}: {text}" for position, text in self.new_operators)
        return f"{what}: {self.new_operator_count} operators are new, first {named}{inputs}"


class MemoryNumbers:
    """A number for each memory that was seen, as long as it lives.

    A memory is told by the Python object of its storage, which lives exactly as long as the storage. Nothing of one
    that is gone is kept: a weak reference of torch's own keeps the header of the storage, a few bytes on the heap that
    keep a large freed block beside them from being used again (5.7 GiB after 120 tensors of 48 MiB, one at a time).
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._count = 0

    def __contains__(self, memory: int) -> bool:
        return memory in self._seen

    def number(self, tensor: Tensor, memory: int) -> tuple[int, bool]:
        """The number of a tensor's memory, and whether it is seen for the first time. memory: what `memory_of` said."""
        known = self._seen.get(memory)
        if known is not None:
            return known[0], False
        seen, number = self._seen, self._count
        # called before the storage is gone: its id is given to nothing that is still found here
        seen[memory] = number, weakref.ref(_owner(tensor), lambda _: seen.pop(memory))
        self._count += 1
        return number, True


def memory_of(tensor: Tensor) -> int:
    """What tells memories apart while they live."""
    return id(_owner(tensor))


def _owner(tensor: Tensor) -> object:
    """A packed weight has no storage and stands for itself."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor
