"""Stores weights whose fp32 values fit in fewer bits: no value changes, and a step with few rows reads less memory.

Most checkpoints hold bfloat16 values. Those that were once quantised (GGUF's Q4_1 and Q8_0) hold codes of 4 or 8 bits
and a scale for every 32 inputs, whatever dtype they are loaded in. Reading the weights limits decode steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.library import native

GROUP = 32
COMPACT_WIDTHS = (64, 48, 32, 16, 8)
# Outputs that are checked first, so that a weight of another form is rejected without a pass over all of it.
SAMPLE = 16
# Outputs encoded at a time, which bounds the scratch memory.
CHUNK = 2048


class Form(IntEnum):
    """How values are stored, numbered as in `compact_linear.cpp`."""

    BFLOAT16 = 0
    AFFINE4 = 1
    SYMMETRIC8 = 2
    # 3 is fp32, see `packed_linear`
    FLOAT16 = 4


class Compact(NamedTuple):
    """A weight [outputs, inputs] in panels of `width` outputs.

    codes: [panels, inputs, width] with 16 or 8 bits each, or [panels, inputs / 2, width] with two codes of 4 bits per
        byte. scales, offsets: fp32 [panels, inputs / 32, width]; empty if the form has none.
    """

    form: Form
    codes: Tensor
    scales: Tensor
    offsets: Tensor
    width: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes


class _Encoded(NamedTuple):
    """Like `Compact`, with one row per output."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor


def find_compact(weight: Tensor) -> Compact | None:
    """The smallest form that holds an fp32 weight exactly; None if none does, or without native kernels."""
    kernels = native()
    if kernels is None or weight.dtype != torch.float32 or weight.shape[1] % GROUP:
        return None
    widths = [width for width in COMPACT_WIDTHS if width % kernels.ucm_lanes() == 0 and weight.shape[0] % width == 0]
    if not widths:
        return None
    for form, encode in _ENCODERS.items():
        if form is Form.FLOAT16 and matrix_unit.in_use():
            continue  # its tiles have fewer bits
        if encode(weight[:SAMPLE]) is None:
            continue
        chunks = [encoded for rows in weight.split(CHUNK) if (encoded := encode(rows)) is not None]
        if sum(len(encoded.codes) for encoded in chunks) == len(weight):
            codes, scales, offsets = (_panels(torch.cat(part), widths[0]) for part in zip(*chunks, strict=True))
            return Compact(form, codes, scales, offsets, widths[0])
    return None


def _panels(by_output: Tensor, width: int) -> Tensor:
    """[outputs, n] -> [outputs / width, n, width]."""
    return by_output.view(len(by_output) // width, width, by_output.shape[1]).transpose(1, 2).contiguous()


def _affine4(weight: Tensor) -> _Encoded | None:
    """GGUF's Q4_1: the minimum of a group has code 0, the maximum 15; the step is in half precision."""
    groups = _groups(weight)
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = ((high - low) / 15).half().float()
    codes = _codes(groups - low, step)
    # a product of 4 and 11 bits is exact, so the sum rounds once, as in the kernel
    if codes.amax() > 15 or not torch.equal(codes * step + low, groups):
        return None
    pairs = codes.to(torch.uint8).view(len(weight), -1, 2)
    return _Encoded(pairs[..., 0] | pairs[..., 1] << 4, step[..., 0], low[..., 0])


def _symmetric8(weight: Tensor) -> _Encoded | None:
    """GGUF's Q8_0: the value farthest from zero has code 127 or -127."""
    groups = _groups(weight)
    step = (groups.abs().amax(2, keepdim=True) / 127).half().float()
    codes = _codes(groups, step)
    if codes.abs().amax() > 127 or not torch.equal(codes * step, groups):
        return None
    return _Encoded(codes.to(torch.int8).view(weight.shape), step[..., 0], weight.new_empty(len(weight), 0))


def _bfloat16(weight: Tensor) -> _Encoded | None:
    half = weight.bfloat16()
    none = weight.new_empty(len(weight), 0)
    return _Encoded(half.view(torch.int16), none, none) if torch.equal(half.float(), weight) else None


def _float16(weight: Tensor) -> _Encoded | None:
    half = weight.half()
    none = weight.new_empty(len(weight), 0)
    return _Encoded(half.view(torch.int16), none, none) if torch.equal(half.float(), weight) else None


def _groups(weight: Tensor) -> Tensor:
    return weight.reshape(len(weight), -1, GROUP)


def _codes(values: Tensor, step: Tensor) -> Tensor:
    return (values / torch.where(step == 0, 1.0, step)).round_()


_ENCODERS: dict[Form, Callable[[Tensor], _Encoded | None]] = {
    Form.AFFINE4: _affine4,
    Form.SYMMETRIC8: _symmetric8,
    Form.BFLOAT16: _bfloat16,
    Form.FLOAT16: _float16,
}


PANEL_WIDTHS = (64, 48, 32, 24, 16, 8)
# Lanes of instructions for pairs: always 16.
PAIR_WIDTHS = (64, 48, 32, 16)
# Panel width per weight shape, 0 if the format is another one. A width is kept only if a weight proves it: zeros look
# alike in panels of any width and in plain memory.
_widths: dict[torch.Size, int] = {}


class Panels(NamedTuple):
    """A weight [out, in] stored as [out / width, in, width] at `address`, in the memory of `owner`.

    Pairs are stored as [out / width, in / 2, width, 2].
    """

    owner: Tensor
    address: int
    width: int


def find_panels(weight: Tensor, packed: Tensor) -> Panels | None:
    """The panels of a packed fp32 weight; None if the native kernel cannot read them."""
    kernels = native()
    address = _address(packed)
    if kernels is None or address is None or weight.dtype != torch.float32:
        return None
    width = _widths.get(weight.shape)
    if width is None:
        found = _fitting_widths(weight, address, int(torch.ops.mkldnn._nbytes(packed)))
        width = found[0] if found and found[0] in PANEL_WIDTHS else 0
        if len(found) < 2:
            _widths[weight.shape] = width
    return Panels(packed, address, width) if width and width % kernels.ucm_lanes() == 0 else None


def panels_of(weight: Tensor) -> Panels | None:
    """An fp32 weight in panels of our own, a copy; None without native kernels, or if its outputs do not divide
    evenly.
    """
    kernels = native()
    if kernels is None or weight.dtype != torch.float32:
        return None
    widths = (width for width in PANEL_WIDTHS if width % kernels.ucm_lanes() == 0 and len(weight) % width == 0)
    width = next(widths, None)
    if width is None:
        return None
    panels = _panels(weight.detach(), width)
    return Panels(panels, panels.data_ptr(), width)


def _fitting_widths(weight: Tensor, address: int, size: int) -> list[int]:
    """Every panel width that reproduces the weight; width 1 means rows, and all outputs means columns, in sequence."""
    outputs, inputs = weight.shape
    if size != weight.numel() * weight.element_size():
        return []  # padded
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32)
    found = []
    for width in dict.fromkeys((*PANEL_WIDTHS, 1, outputs)):
        if outputs % width == 0:
            panels = weight.detach().view(outputs // width, width, inputs).transpose(1, 2)
            if _same(memory.view(panels.shape), panels):
                found.append(width)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """True if all values are equal. NaN equals NaN here; otherwise a broken weight would look like another format."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _address(packed: Tensor) -> int | None:
    """Uses torch's stable C interface, because `Tensor.data_ptr` refuses oneDNN's tensors; None if torch lacks it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        get_data_ptr = library.aoti_torch_get_data_ptr
    except (OSError, AttributeError):
        return None
    # A handle is a pointer to a tensor, and a tensor is a pointer to its implementation.
    tensor, found = ctypes.c_void_p(packed._cdata), ctypes.c_void_p()
    status = get_data_ptr(ctypes.byref(tensor), ctypes.byref(found))
    return found.value if status == 0 else None


def find_pairs(weight: Tensor) -> Panels | None:
    """A bfloat16 weight as [out / width, in / 2, width, 2], for instructions that multiply pairs of bfloat16.

    A copy. None if this CPU has no such instructions, without native kernels, or if the weight does not divide so.
    """
    kernels = native()
    if kernels is None or weight.dtype != torch.bfloat16 or not kernels.ucm_multiplies_bf16():
        return None
    return pairs_of(weight)


def pairs_of(weight: Tensor) -> Panels | None:
    """Does the same on any CPU."""
    outputs, inputs = weight.shape
    width = next((width for width in PAIR_WIDTHS if outputs % width == 0), None)
    if width is None or inputs % 2:
        return None
    pairs = weight.detach().view(outputs // width, width, inputs // 2, 2).transpose(1, 2).contiguous()
    return Panels(pairs, pairs.data_ptr(), width)
