"""Mixture of experts of one layer: prepares its experts once, validates rows, and calls the implementation.

Routing is up to the model: this operation gets the experts that each row takes, and their shares.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.codes import CodedExperts
from vllm_gaudi_ucm.ops.moe.implementation import MOE, ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import CODES, MoeSpec
from vllm_gaudi_ucm.ops.registry import AUTO, has_folders


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer on this device, in the form that an implementation reads.

    form: what the implementation made of the weights. kept: the weights themselves; None if they are packed.
    """

    spec: MoeSpec
    implementation: MoeImplementation
    form: Any
    count: int
    hidden: int
    dtype: torch.dtype
    device: str
    kept: ExpertWeights | CodedExperts | None


def prepare_experts(
    weights: ExpertWeights, spec: MoeSpec, *, implementation: str = AUTO, captured: bool = False
) -> Experts:
    """Prepares a layer's experts once, for all rows. The weights must not change while the result is in use.

    implementation: a name in `MOE`, or `auto` for the fastest suitable one: `cpu` on a CPU, `hpu` on a Gaudi, `cuda` on
        a GPU with Triton, `grouped` on a GPU without; otherwise `reference`.
    captured: the experts will run while a graph is captured, at static shapes.

    Raises ValueError if shapes, dtypes or devices do not match, or if no implementation, or not the requested one,
    supports the case.
    """
    validate_weights(weights, spec)
    chosen = MOE.choose(implementation, weights.w13.device.type, spec, captured=captured)
    return _experts(weights, spec, chosen, chosen.prepare(weights, spec), weights)


def prepare_coded_experts(
    weights: CodedExperts, spec: MoeSpec, *, implementation: str = AUTO, captured: bool = False
) -> Experts:
    """Like `prepare_experts`, for weights that stay the codes of a checkpoint. Each element has its exact value.

    An implementation may round to the dtype of rows; `reference` rounds to float32.
    """
    validate_codes(weights, spec)
    spec, device = replace(spec, weights=CODES), weights.w13.codes.device.type
    chosen = MOE.choose(implementation, device, spec, captured=captured)
    experts, _, hidden = weights.w13.shape
    form = chosen.prepare_codes(weights, spec)
    return Experts(spec, chosen, form, experts, hidden, weights.dtype, device, weights)


def are_codes_enough(weights: CodedExperts, spec: MoeSpec, *, captured: bool = False) -> bool:
    """True if the fastest implementation for these weights takes about as long for codes as for plain weights."""
    chosen = MOE.choose(AUTO, weights.w13.codes.device.type, spec, captured=captured)
    return chosen.supports(replace(spec, weights=CODES)) and chosen.takes_codes(weights)


def pack_experts(weights: ExpertWeights, spec: MoeSpec, compact: bool = False) -> Experts | None:
    """Like `prepare_experts` for a CPU, with weights packed by `ops/cpu/packed_linear`. They are copies: the plain
    weights may be freed.

    compact: also look for forms of fewer bits. Returns None if weights of this dtype and device cannot be packed.
    """
    if not has_folders("cpu"):
        return None
    from vllm_gaudi_ucm.ops.cpu.packed_linear.api import can_pack
    from vllm_gaudi_ucm.ops.moe.impl.cpu.experts import pack_each

    if not can_pack(weights.w13):
        return None
    validate_weights(weights, spec)
    form, packed_spec = pack_each(weights, spec, compact)
    return _experts(weights, packed_spec, MOE.make("cpu"), form, None)


def _experts(
    weights: ExpertWeights, spec: MoeSpec, chosen: MoeImplementation, form: Any, kept: ExpertWeights | None
) -> Experts:
    w13 = weights.w13
    return Experts(spec, chosen, form, w13.shape[0], w13.shape[2], w13.dtype, w13.device.type, kept)


def mixture_of_experts(x: Tensor, ids: Tensor, shares: Tensor, experts: Experts) -> Tensor:
    """The sum over a row's chosen experts: share * (w2 gate(w13 x + bias) + bias).

    x: [rows, hidden] in the dtype of the weights.
    ids: int64 or int32 [rows, chosen], numbers of experts on this device. A number outside of 0 to count - 1 (an expert
        of another device, or of a padded row) adds nothing and costs nothing.
    shares: float [rows, chosen], the router's weights.

    Returns [rows, hidden] in the dtype of x. A row reads itself and its experts alone, so NaN in other rows, and in
    experts that it did not choose, does not reach it; a row without experts is zeros, whatever its content.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    chosen = experts.implementation
    if not torch.compiler.is_compiling():
        validate_rows(x, ids, shares, experts.hidden, experts.dtype, experts.device)
        if not x.shape[0]:
            return torch.empty_like(x)
    elif not chosen.traceable:
        assert experts.kept is not None, "packed experts cannot be compiled"
        return _REFERENCE.compute(x, ids, shares, experts.kept, experts.spec)
    return chosen.compute(x, ids, shares, experts.form, experts.spec)


_REFERENCE = MOE.make("reference")


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
