"""Mixture of experts by definition: every expert computes every row, and each row takes the results of its experts.

Static shapes, and nothing is read on the host, so it may be captured and traced. It costs all experts for all rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes
from vllm_gaudi_ucm.ops.moe.gate import gate
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import CODES, PLAIN, MoeSpec


class ReferenceMoe(MoeImplementation):
    """The reference: computes in float32, or in float64 for float64. Codes are exact but for that rounding."""

    def supports(self, spec: MoeSpec) -> bool:
        return spec.weights in (PLAIN, CODES)

    def compute(
        self, x: Tensor, ids: Tensor, shares: Tensor, form: ExpertWeights | CodedExperts, spec: MoeSpec
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x.to(wide)
        total = torch.zeros_like(rows)
        for number in range(form.w13.shape[0]):
            both = functional.linear(rows, _matrix(form.w13, number, wide), _of(form.w13_bias, number, wide))
            found = functional.linear(gate(both, spec), _matrix(form.w2, number, wide), _of(form.w2_bias, number, wide))
            took = ids == number
            share = shares.to(wide).masked_fill(~took, 0).sum(-1, keepdim=True)
            # not by a share of zero: experts that a row did not choose may be NaN
            total = total + (found * share).masked_fill(~took.any(-1, keepdim=True), 0)
        return total.to(x.dtype)


def _matrix(weights: Tensor | ExpertCodes, number: int, dtype: torch.dtype) -> Tensor:
    return weights.write_out(number, dtype) if isinstance(weights, ExpertCodes) else weights[number].to(dtype)


def _of(bias: Tensor | None, number: int, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[number].to(dtype)
