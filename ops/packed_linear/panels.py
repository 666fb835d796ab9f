"""Where oneDNN keeps a packed weight, and whether it lies there in the panels that the native kernel reads.

oneDNN's format is its own and may change with the CPU and the release. So nothing is assumed: for every shape of weight
the memory is compared once with what it should hold, and where it differs only oneDNN reads the weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native

WIDTHS = (64, 48, 32, 24, 16, 8)
# Panel width per weight shape, 0 where the format is another one. Only what a weight proves is kept: zeros look alike
# in panels of any width and in plain memory.
_widths: dict[torch.Size, int] = {}


class Panels(NamedTuple):
    """A weight [out, in] as [out / width, in, width] at `address`, in the memory of `owner`."""

    owner: Tensor
    address: int
    width: int


def find_panels(weight: Tensor, packed: Tensor) -> Panels | None:
    """The panels of an fp32 weight that was packed, None where the native kernel cannot read them."""
    kernels = native()
    address = _address(packed)
    if kernels is None or address is None or weight.dtype != torch.float32:
        return None
    width = _widths.get(weight.shape)
    if width is None:
        found = _fitting_widths(weight, address, int(torch.ops.mkldnn._nbytes(packed)))
        width = found[0] if found and found[0] in WIDTHS else 0
        if len(found) < 2:
            _widths[weight.shape] = width
    return Panels(packed, address, width) if width and width % kernels.ucm_lanes() == 0 else None


def _fitting_widths(weight: Tensor, address: int, size: int) -> list[int]:
    """Every width at which the memory holds the weight; 1 and all outputs are rows and columns one after the other."""
    outputs, inputs = weight.shape
    if size != weight.numel() * weight.element_size():
        return []  # padded
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32)
    found = []
    for width in dict.fromkeys((*WIDTHS, 1, outputs)):
        if outputs % width == 0:
            panels = weight.detach().view(outputs // width, width, inputs).transpose(1, 2)
            if _same(memory.view(panels.shape), panels):
                found.append(width)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal; NaN is equal to NaN here, or a broken weight would look like another format."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _address(packed: Tensor) -> int | None:
    """Through torch's stable C interface: `Tensor.data_ptr` refuses oneDNN's tensors. None where torch lacks it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        get_data_ptr = library.aoti_torch_get_data_ptr
    except (OSError, AttributeError):
        return None
    # A handle is a pointer to a tensor, and a tensor is a pointer to its implementation.
    tensor, found = ctypes.c_void_p(packed._cdata), ctypes.c_void_p()
    status = get_data_ptr(ctypes.byref(tensor), ctypes.byref(found))
    return found.value if status == 0 else None
