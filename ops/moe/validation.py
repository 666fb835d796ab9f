"""Checks of the tensors of a mixture of experts: errors name the tensor, what was found and what was expected."""

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.codes import CodedExperts
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec


def validate_weights(weights: ExpertWeights, spec: MoeSpec) -> None:
    """Raises ValueError if weights do not match `spec` or each other."""
    w13, w2 = weights.w13, weights.w2
    if w13.dim() != 3 or w2.dim() != 3 or not w13.is_floating_point():
        raise ValueError(f"experts: w13 is {_kind(w13)}, w2 {_kind(w2)}; expected floats of three dimensions")
    experts, double, hidden = w13.shape
    if double % 2 or tuple(w2.shape) != (experts, hidden, double // 2):
        raise ValueError(
            f"experts: w13 is {_kind(w13)}, w2 {_kind(w2)}; expected [experts, 2 * inner, hidden] and "
            "[experts, hidden, inner]"
        )
    if min(experts, double, hidden) < 1:
        raise ValueError(f"experts: w13 is {_kind(w13)}, expected at least one expert, and no empty dimension")
    _same("w2", w2, w13)
    for name, bias, size in (("w13_bias", weights.w13_bias, double), ("w2_bias", weights.w2_bias, hidden)):
        if (bias is not None) != spec.bias:
            raise ValueError(f"experts: {name} is {'there' if bias is not None else 'missing'}, spec.bias {spec.bias}")
        if bias is None:
            continue
        if tuple(bias.shape) != (experts, size):
            raise ValueError(f"experts: {name} is {_kind(bias)}, expected [{experts}, {size}]")
        _same(name, bias, w13)


def validate_codes(weights: CodedExperts, spec: MoeSpec) -> None:
    """Raises ValueError if codes do not match `spec` or each other."""
    experts, double, hidden = weights.w13.shape
    if double % 2 or weights.w2.shape != (experts, hidden, double // 2):
        raise ValueError(
            f"experts: codes of w13 {weights.w13.shape}, of w2 {weights.w2.shape}; expected [experts, 2 * inner, "
            "hidden] and [experts, hidden, inner]"
        )
    for one in (weights.w13, weights.w2):
        one.expert(0).check()
    for name, bias, size in (("w13_bias", weights.w13_bias, double), ("w2_bias", weights.w2_bias, hidden)):
        if (bias is not None) != spec.bias:
            raise ValueError(f"experts: {name} is {'there' if bias is not None else 'missing'}, spec.bias {spec.bias}")
        if bias is not None and (tuple(bias.shape) != (experts, size) or bias.dtype != weights.dtype):
            raise ValueError(f"experts: {name} is {_kind(bias)}, expected {weights.dtype} [{experts}, {size}]")


def validate_rows(x: Tensor, ids: Tensor, shares: Tensor, hidden: int, dtype: torch.dtype, device: str) -> None:
    """Raises ValueError if rows do not match the prepared experts."""
    if x.dim() != 2 or x.shape[1] != hidden or x.dtype != dtype:
        raise ValueError(f"mixture_of_experts: x is {_kind(x)}, expected {dtype} [rows, {hidden}]")
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2 or ids.shape[0] != x.shape[0] or not ids.shape[1]:
        raise ValueError(f"mixture_of_experts: ids are {_kind(ids)}, expected integers [{x.shape[0]}, chosen]")
    if not shares.is_floating_point() or shares.shape != ids.shape:
        raise ValueError(f"mixture_of_experts: shares are {_kind(shares)}, expected floats {tuple(ids.shape)}")
    if not x.device == ids.device == shares.device or x.device.type != device:
        raise ValueError(
            f"mixture_of_experts: x is on {x.device}, ids on {ids.device}, shares on {shares.device}, the experts on "
            f"{device}; expected one device"
        )


def _same(name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise ValueError(f"experts: {name} is {_kind(tensor)}, w13 {_kind(first)}; expected one dtype and device")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
