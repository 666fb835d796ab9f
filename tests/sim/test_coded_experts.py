"""Experts whose weights stay 8-bit floats on the simulated card, in and out of compiled regions, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.ops.quantised import exact, random_weight
from vllm_gaudi_ucm.graphs.cost.experts import ExpertSpec
from vllm_gaudi_ucm.ops.moe.api import Experts, mixture_of_experts, prepare_coded_experts
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes, ExpertPacker
from vllm_gaudi_ucm.ops.moe.impl.hpu.experts import why_not_codes, within_range
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight
from vllm_gaudi_ucm_tools.buckets.expert_codes import CodeSpec
from vllm_gaudi_ucm_tools.buckets.held_weights import expert_bytes

PT_HPU_LAZY_MODE = "0"
EXPERTS, HIDDEN, INNER, ROWS = 3, 32, 16, 6
E4M3 = torch.float8_e4m3fn
SWIGLU = MoeSpec()
LARGEST = 240.0


def weights_of(outputs: int, inputs: int) -> list[QuantisedWeight]:
    """Each with a number beyond the range of a Gaudi 2."""
    found = [random_weight(outputs, inputs, (1, inputs), E4M3, seed=seed) for seed in range(EXPERTS)]
    for weight in found:
        weight.codes[1, 2] = 448
    return found


def packed(weights: list[QuantisedWeight]) -> ExpertCodes:
    packer = ExpertPacker(EXPERTS, "whole")
    for number, weight in enumerate(weights):
        packer.add(number, weight)
    return packer.finish()


class Layer:
    """A layer's experts on the card, and what they mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.w13, self.w2 = weights_of(2 * INNER, HIDDEN), weights_of(HIDDEN, INNER)
        halved = (within_range(packed(weights), LARGEST).to(torch.device("hpu")) for weights in (self.w13, self.w2))
        self.experts: Experts = prepare_coded_experts(CodedExperts(*halved, dtype, largest=LARGEST), MoeSpec())
        random = torch.Generator().manual_seed(4)
        self.x = torch.randn(ROWS, HIDDEN, generator=random).to(dtype)
        # the last row is a pad's
        self.ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [EXPERTS, EXPERTS]])
        self.shares = torch.rand(ROWS, 2, generator=random)

    def compute(self, *, compiled: bool) -> Tensor:
        def run(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
            return mixture_of_experts(x, ids, shares, self.experts)

        given = [part.to("hpu") for part in (self.x, self.ids, self.shares)]
        return (torch.compile(run, backend="hpu_backend", dynamic=False) if compiled else run)(*given).cpu()

    def expected(self) -> Tensor:
        found = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
        for row, (x, chosen, shares) in enumerate(zip(self.x.double(), self.ids.tolist(), self.shares, strict=True)):
            for number, share in zip(chosen, shares.double(), strict=True):
                if number < EXPERTS:
                    gate, up = (exact(self.w13[number]) @ x).chunk(2)
                    found[row] += share * (exact(self.w2[number]) @ (functional.silu(gate) * up))
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [True, False])
def test_codes_beyond_the_range_of_a_gaudi_2(dtype: torch.dtype, compiled: bool) -> None:
    """In a region rows, and what lies between the products, have 8 bits; out of it nothing is rounded but to the
    dtype of rows."""
    layer = Layer(dtype)
    assert layer.experts.implementation.name == "hpu"
    found, expected = layer.compute(compiled=compiled), layer.expected()
    assert found.dtype == dtype
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < (0.08 if compiled else 0.02 if dtype == torch.bfloat16 else 1e-3)
    assert not found[-1].any()


def test_a_plan_counts_the_bytes_that_are_held() -> None:
    held = packed(weights_of(2 * INNER, HIDDEN)).nbytes + packed(weights_of(HIDDEN, INNER)).nbytes
    codes = CodeSpec.of_experts({"quantization_config": {"quant_method": "fp8"}}, layers=1)
    assert codes is not None
    assert codes.why_not_on_gaudi(HIDDEN, INNER) is None
    assert expert_bytes(ExpertSpec(EXPERTS, 2, INNER, 0, 1), HIDDEN, 3, codes) == held


def test_what_has_no_product() -> None:
    w13, w2 = packed(weights_of(2 * INNER, HIDDEN)), packed(weights_of(HIDDEN, INNER))

    def why(spec: MoeSpec = SWIGLU, **changed: Any) -> str | None:
        return why_not_codes(CodedExperts(w13._replace(**changed), w2, torch.bfloat16), spec)

    assert why() is None
    assert why(codes=w13.codes.view(torch.int8)) == "its product takes 8-bit floats"
    assert why(block=(1, 16)) == "its product takes one scale for each output"
    assert why(block=(2, HIDDEN)) == "its product takes one scale for each output"
    assert "form=gelu" in str(why(MoeSpec("gelu")))
    assert "bias=True" in str(why(MoeSpec(bias=True)))
