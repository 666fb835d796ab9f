"""Arguments of an operator as text: equal texts mean that a device could not tell them apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

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
