"""Mixture of experts on a Gaudi by `torch.ops.hpu.mixture_of_experts`: lists of matrices, one for each expert.

Codes are 8-bit floats with a scale per output. The operator for them takes rows rounded to 8-bit floats, and rounds the
input of its second product too, each row with a scale of its own. Its results are bfloat16. Outside of compiled
regions, the vendor's source omits one of the scales and has no scales per output, so weights are dequantised there.

Few rows of a layer with many small experts gather the ones that they chose (`gathered.py`), unless these are codes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.hpu.operators import CAST_TO_FP8, EXPERTS, EXPERTS_FP8, EXPERTS_WITH_BIAS
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes
from vllm_gaudi_ucm.ops.moe.impl.hpu.gathered import compute_gathered, gathering_pays
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import CODES, PLAIN, MoeSpec
from vllm_gaudi_ucm.ops.narrow_floats import widened
from vllm_gaudi_ucm.ops.quantised_linear.impl.hpu.products import narrow_rows

# The operator's names for gates; its gelu is the tanh form.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}


class Matrices(NamedTuple):
    """Views of each expert's weights and biases, made once: at the same offsets in every layer. whole: what they are
    views of.
    """

    w13: list[Tensor]
    w2: list[Tensor]
    w13_bias: list[Tensor]
    w2_bias: list[Tensor]
    whole: ExpertWeights


class CodedMatrices(NamedTuple):
    """Views of each expert's codes, and of the scales of its outputs. largest: the largest magnitude of a code."""

    w13: list[Tensor]
    w2: list[Tensor]
    w13_scales: list[Tensor]
    w2_scales: list[Tensor]
    largest: float


def within_range(codes: ExpertCodes, largest: float) -> ExpertCodes:
    """Brings codes into the card's range. Runs on the host, because the card has no numbers beyond its range.

    If any code is out of range, all are halved and the scales doubled. Values below 2 ** -6 lose their last bit.
    """
    if largest >= 448 or float(codes.codes.float().abs().amax()) <= largest:
        return codes
    halved = (codes.codes.float() * 0.5).to(codes.codes.dtype)
    return codes._replace(codes=halved, scales=codes.scales * 2)


def why_not_codes(weights: CodedExperts, spec: MoeSpec) -> str | None:
    """Returns why a Gaudi has no product with these codes, in words; None if it has one."""
    for codes in (weights.w13, weights.w2):
        if codes.codes.dtype != torch.float8_e4m3fn or codes.zeros is not None:
            return "its product takes 8-bit floats"
        if codes.block[0] != 1 or codes.block[1] < codes.shape[2]:
            return "its product takes one scale for each output"
    if spec.bias or spec.form not in ACTIVATIONS or not spec.is_plain_gate:
        return f"its product has no {spec}"
    for operator in (EXPERTS_FP8, CAST_TO_FP8):
        found = operator.resolve()
        if found.call is None:
            return found.why
    return None


class HpuMoe(MoeImplementation):
    """Mixture of experts by Gaudi's operator, for the gates that it knows: SwiGLU and GeGLU without biases, and
    gpt-oss's with biases.
    """

    devices: ClassVar[frozenset[str] | None] = frozenset({"hpu"})
    priority: ClassVar[int] = 10

    def supports(self, spec: MoeSpec) -> bool:
        if spec.weights != PLAIN:
            is_plain = not spec.bias and spec.form in ACTIVATIONS and spec.is_plain_gate
            has_operators = all(one.resolve().call is not None for one in (EXPERTS_FP8, CAST_TO_FP8))
            return spec.weights == CODES and is_plain and has_operators
        if spec.bias:
            of_gpt_oss = spec.form == "silu" and spec.interleaved and spec.beta == 1 and spec.limit is not None
            return of_gpt_oss and EXPERTS_WITH_BIAS.resolve().call is not None
        return spec.form in ACTIVATIONS and spec.is_plain_gate and EXPERTS.resolve().call is not None

    def prepare(self, weights: ExpertWeights, spec: MoeSpec) -> Matrices:
        w13, w2, w13_bias, w2_bias = ([] if each is None else list(each.detach().unbind(0)) for each in weights)
        return Matrices(w13, w2, w13_bias, w2_bias, weights)

    def prepare_codes(self, weights: CodedExperts, spec: MoeSpec) -> CodedMatrices:
        """Prepares codes for which `why_not_codes` is None, within the range of the card."""
        w13, w2 = weights.w13, weights.w2
        parts = w13.codes, w2.codes, w13.scales.squeeze(2), w2.scales.squeeze(2)
        codes13, codes2, scales13, scales2 = (list(part.detach().unbind(0)) for part in parts)
        return CodedMatrices(codes13, codes2, scales13, scales2, weights.largest)

    def compute(self, x: Tensor, ids: Tensor, shares: Tensor, form: Matrices | CodedMatrices, spec: MoeSpec) -> Tensor:
        if isinstance(form, CodedMatrices):
            return _by_codes(x, ids, shares, form, ACTIVATIONS[spec.form])
        if gathering_pays(x.shape[0], ids.shape[1], form.whole):
            return compute_gathered(x, ids, shares, form.whole, spec)
        return self.fused(x, ids, shares, form, spec)

    def fused(self, x: Tensor, ids: Tensor, shares: Tensor, form: Matrices, spec: MoeSpec) -> Tensor:
        """Computes rows by the vendor's operator; tensors as in `compute`."""
        # the graph compiler refuses other dtypes of ids and shares
        chosen = x, ids.to(torch.int64), shares.to(x.dtype)
        last = len(form.w13) - 1
        if spec.bias:
            return torch.ops.hpu.mixture_of_experts.bias_fused_weights(
                *chosen,
                *(form.w13, form.w2, form.w13_bias, form.w2_bias),
                permuted_weights=True,
                experts_min=0,
                experts_max=last,
                alpha=spec.alpha,
                limit=spec.limit,
            )
        # positional: builds differ in the parameter names of this overload
        return torch.ops.hpu.mixture_of_experts.fused_weights(
            *chosen, form.w13, form.w2, True, ACTIVATIONS[spec.form], 0, last
        )


def _by_codes(x: Tensor, ids: Tensor, shares: Tensor, form: CodedMatrices, activation: str) -> Tensor:
    last, ids = len(form.w13) - 1, ids.to(torch.int64)
    if not torch.compiler.is_compiling():
        w13, w2 = (
            [
                widened(codes, torch.float32).mul(scale.unsqueeze(1)).to(x.dtype)
                for codes, scale in zip(*both, strict=True)
            ]
            for both in ((form.w13, form.w13_scales), (form.w2, form.w2_scales))
        )
        plain: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
            x, ids, shares.to(x.dtype), w13, w2, True, activation, 0, last
        )
        return plain
    narrow, scale = narrow_rows(x, form.largest)
    found: Tensor = torch.ops.hpu.mixture_of_experts.fp8_fused_weights_dynamic(
        *(narrow, ids, shares.to(torch.bfloat16), form.w13, form.w2, scale, form.w13_scales, form.w2_scales),
        *(True, activation, 0, last),
    )
    return found.to(x.dtype)
