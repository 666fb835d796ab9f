"""8-bit floats: casts that multiply by their scale and saturate, and the matrix product that takes scales back out."""

from collections.abc import Sequence

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel
from habana_frameworks.torch.simulator.number_formats import FORMATS, saturated

import torch
from torch import Tensor

Scale = Tensor | float | Sequence[float] | None

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CAST_TO = "bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None"
_CAST_FROM = "ScalarType out_dtype, int[]? scale_shape=None"
_GEMM = "Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, {scales}, "
_GEMM_END = "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None"


def cast_to_fp8_v2(
    input: Tensor,
    scale: Scale = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(input * scale in 8 bits, saturated; the largest |input| as an f32 number, NaN unless it was asked for).

    The scale multiplies: callers that divide give its inverse. scale_shape: what the scale is reshaped to.
    """
    name = "hpu.cast_to_fp8_v2"
    if dtype not in _FP8:
        duties.refuse(FORMATS, name, f"dtype {dtype}", "name torch.float8_e4m3fn or torch.float8_e5m2")
    if stochastic_rounding:
        duties.refuse(FORMATS, name, "stochastic rounding", "this stand-in rounds to nearest")
    x = input.float()
    if scale is not None:
        x = x * _spread(scale, scale_shape, x)
    top = input.float().abs().amax() if is_amax else x.new_full((), float("nan"))
    return saturated(x, dtype or torch.float8_e4m3fn), top


def cast_from_fp8(input: Tensor, scale: Scale, out_dtype: torch.dtype, scale_shape: list[int] | None = None) -> Tensor:
    """input * scale in a wider dtype."""
    if input.dtype not in _FP8:
        duties.refuse(FORMATS, "hpu.cast_from_fp8", f"the input is {input.dtype}", "it is for 8-bit floats")
    x = input.float()
    return (x if scale is None else x * _spread(scale, scale_shape, x)).to(out_dtype)


def fp8_gemm_v2(
    A: Tensor,
    trans_A: bool,
    B: Tensor,
    trans_B: bool,
    D: Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Scale = None,
    B_scale_inv: Scale = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> Tensor:
    """A @ B of 8-bit floats in f32, times both inverse scales, plus bias (and D, where it accumulates).

    A: e4m3 [..., m, k], B: e4m3 [k, n] after the transpositions. A_scale_inv: one, or [m, 1]; B_scale_inv: one, or [n].
    """
    name = "hpu.fp8_gemm_v2"
    for argument, tensor in (("A", A), ("B", B)):
        if tensor.dtype not in _FP8:
            duties.refuse(FORMATS, name, f"{argument} is {tensor.dtype}", "cast it with cast_to_fp8_v2")
    left, right = A.float(), B.float()
    product = torch.matmul(left.transpose(-1, -2) if trans_A else left, right.transpose(-1, -2) if trans_B else right)
    if A_scale_inv is not None:
        product = product * _spread(A_scale_inv, None, product)
    if B_scale_inv is not None:
        product = product * _spread(B_scale_inv, B_scale_shape, product)
    if bias is not None:
        product = product + bias.float()
    if accumulate and D is not None:
        product = product + D.float()
    return product.to(out_dtype)


def _spread(scale: Scale, shape: list[int] | None, like: Tensor) -> Tensor | float:
    """A scale as what a tensor is multiplied by."""
    if isinstance(scale, Tensor):
        wide = scale.float()
        return wide if shape is None else wide.reshape(shape)
    if isinstance(scale, Sequence):
        values = torch.tensor(list(scale), dtype=torch.float32, device=like.device)
        return values if shape is None else values.reshape(shape)
    return 1.0 if scale is None else scale


KERNELS = (
    Kernel(f"cast_to_fp8_v2(Tensor input, Tensor? scale=None, {_CAST_TO}) -> (Tensor, Tensor)", cast_to_fp8_v2),
    Kernel(f"cast_to_fp8_v2.scalar(Tensor input, float scale, {_CAST_TO}) -> (Tensor, Tensor)", cast_to_fp8_v2),
    Kernel(f"cast_to_fp8_v2.scalar_list(Tensor input, float[] scale, {_CAST_TO}) -> (Tensor, Tensor)", cast_to_fp8_v2),
    Kernel(f"cast_from_fp8(Tensor input, Tensor? scale, {_CAST_FROM}) -> Tensor", cast_from_fp8),
    Kernel(f"cast_from_fp8.scalar(Tensor input, float scale, {_CAST_FROM}) -> Tensor", cast_from_fp8),
    Kernel(f"cast_from_fp8.scalar_list(Tensor input, float[] scale, {_CAST_FROM}) -> Tensor", cast_from_fp8),
    Kernel(
        f"fp8_gemm_v2({_GEMM.format(scales='Tensor? A_scale_inv=None, Tensor? B_scale_inv=None')}{_GEMM_END}) "
        "-> Tensor",
        fp8_gemm_v2,
    ),
    Kernel(
        f"fp8_gemm_v2.scalar({_GEMM.format(scales='float A_scale_inv, float B_scale_inv')}{_GEMM_END}) -> Tensor",
        fp8_gemm_v2,
    ),
    Kernel(
        f"fp8_gemm_v2.scalar_list({_GEMM.format(scales='float[] A_scale_inv, float[] B_scale_inv')}{_GEMM_END}) "
        "-> Tensor",
        fp8_gemm_v2,
    ),
)
