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
from vllm_gaudi_ucm.ops.moe.validation import validate_codes, validate_rows, validate_weights
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
