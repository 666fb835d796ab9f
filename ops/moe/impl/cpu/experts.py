"""Mixture of experts on a CPU: each expert multiplies the rows that chose it, and experts without rows do nothing.

It reads the choice of experts on the host, so it can be neither captured nor traced. A row sums its experts in the
order of their numbers, whatever the other rows of the step are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PackedWeight, pack, packed_linear
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes
from vllm_gaudi_ucm.ops.moe.gate import gate
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import CODES, PLAIN, MoeSpec
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul


class CodesOfOne(NamedTuple):
    """The weight of one expert, written out for each product with it."""

    codes: ExpertCodes
    number: int


class Expert(NamedTuple):
    """One expert: [2 * inner, hidden], [hidden, inner], and their biases."""

    w13: Tensor | PackedWeight | CodesOfOne
    w2: Tensor | PackedWeight | CodesOfOne
    w13_bias: Tensor | None
    w2_bias: Tensor | None


class CpuMoe(MoeImplementation):
    """Mixture of experts on a CPU: rows grouped by expert, at true shapes."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cpu"})
    priority: ClassVar[int] = 10
    capturable: ClassVar[bool] = False
    traceable: ClassVar[bool] = False

    def supports(self, spec: MoeSpec) -> bool:
        return spec.weights in (PLAIN, CODES)

    def prepare_codes(self, weights: CodedExperts, spec: MoeSpec) -> Sequence[Expert]:
        numbers = range(weights.w13.shape[0])
        b13, b2 = (_by_expert(bias, len(numbers)) for bias in (weights.w13_bias, weights.w2_bias))
        each = (CodesOfOne(weights.w13, number) for number in numbers)
        others = (CodesOfOne(weights.w2, number) for number in numbers)
        return [Expert(*parts) for parts in zip(each, others, b13, b2, strict=True)]

    def prepare(self, weights: ExpertWeights, spec: MoeSpec) -> Sequence[Expert]:
        return [Expert(*each) for each in _each(weights)]

    def compute(self, x: Tensor, ids: Tensor, shares: Tensor, form: Sequence[Expert], spec: MoeSpec) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(x.shape, dtype=wide)
        shares = shares.to(wide)
        if x.shape[0] == 1:
            for number, share in sorted(zip(ids[0].tolist(), shares[0].tolist(), strict=True)):
                if 0 <= number < len(form):
                    total.add_(_run(x, form[number], spec), alpha=share)
            return total.to(x.dtype)
        numbers, pairs = ids.flatten().sort(stable=True)
        rows = pairs // ids.shape[1]
        each = shares.flatten().index_select(0, pairs).unsqueeze(1)
        bounds = torch.searchsorted(numbers, torch.arange(len(form) + 1, dtype=numbers.dtype)).tolist()
        for expert, begin, end in zip(form, bounds, bounds[1:], strict=False):
            if begin < end:
                took = rows[begin:end]
                found = _run(x.index_select(0, took), expert, spec)
                total.index_add_(0, took, found * each[begin:end])
        return total.to(x.dtype)


def pack_each(weights: ExpertWeights, spec: MoeSpec, compact: bool) -> tuple[Sequence[Expert], MoeSpec]:
    """Packed experts, and their specification: gates come first."""
    experts = []
    for w13, w2, w13_bias, w2_bias in _each(weights):
        if spec.interleaved:
            w13 = torch.cat((w13[::2], w13[1::2]))
            w13_bias = None if w13_bias is None else torch.cat((w13_bias[::2], w13_bias[1::2]))
        experts.append(Expert(pack(w13, compact), pack(w2, compact), w13_bias, w2_bias))
    return experts, replace(spec, interleaved=False)


def _each(weights: ExpertWeights) -> Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    w13, w2 = weights.w13.detach(), weights.w2.detach()
    b13, b2 = (_by_expert(bias, len(w13)) for bias in (weights.w13_bias, weights.w2_bias))
    return list(zip(w13.unbind(0), w2.unbind(0), b13, b2, strict=True))


def _by_expert(bias: Tensor | None, experts: int) -> Sequence[Tensor | None]:
    return [None] * experts if bias is None else bias.detach().unbind(0)


def _run(x: Tensor, expert: Expert, spec: MoeSpec) -> Tensor:
    both = _product(x, expert.w13, expert.w13_bias)
    is_silu = spec.form == "silu" and spec.is_plain_gate and both.dtype == torch.float32
    return _product(silu_and_mul(both) if is_silu else gate(both, spec), expert.w2, expert.w2_bias)


def _product(x: Tensor, weight: Tensor | PackedWeight | CodesOfOne, bias: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight, bias)
    if isinstance(weight, CodesOfOne):
        weight = weight.codes.write_out(weight.number, x.dtype)
    return functional.linear(x, weight, bias)
