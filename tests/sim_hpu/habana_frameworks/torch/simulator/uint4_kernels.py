"""Integers of 4 bits: a weight written out from words of eight, with scales and zeros for groups of inputs."""

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel
from habana_frameworks.torch.simulator.number_formats import FORMATS

import torch
from torch import Tensor

_NAME = "hpu.convert_from_uint4"


def convert_from_uint4(input: Tensor, scale: Tensor, zero_point: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """(code - zero) * scale, [k, n].

    input: int32 [k, n / 8], lowest bits first. scale: [groups, n] in the dtype of the result. zero_point: int32
    [groups, n / 8] in words like the input.
    """
    if input.dtype != torch.int32 or (zero_point is not None and zero_point.dtype != torch.int32):
        duties.refuse(FORMATS, _NAME, f"words are {input.dtype}", "pack eight codes in an int32")
    if scale.dtype != out_dtype:
        duties.refuse(FORMATS, _NAME, f"the scale is {scale.dtype}, the result {out_dtype}", "cast the scale")
    codes = _codes(input)
    each = codes.shape[0] // scale.shape[0]
    if zero_point is not None:
        codes = codes - _codes(zero_point).repeat_interleave(each, 0)
    return (codes * scale.float().repeat_interleave(each, 0)).to(out_dtype)


def _shape(input: Tensor, scale: Tensor, zero_point: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return input.new_empty((input.shape[0], input.shape[1] * 8), dtype=out_dtype)


def _codes(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2).float()


KERNELS = (
    Kernel(
        "convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) -> Tensor",
        convert_from_uint4,
        _shape,
    ),
)
