"""Experts whose weights stay codes, against float64: every kind of codes in every implementation, and their memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.moe import DEVICE, GPT_OSS, GPU, Case, assert_near, make_case, oracle
from tests.ops.oracle import CUDA_RUNS
from tests.ops.quantised import exact, random_weight
from vllm_gaudi_ucm.ops.moe.api import are_codes_enough, mixture_of_experts, prepare_coded_experts
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes, ExpertPacker
from vllm_gaudi_ucm.ops.moe.implementation import MOE, ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import CODES, MoeSpec
from vllm_gaudi_ucm.ops.quantised_linear.packed_codes import CodeKind, pack_codes, unpack_codes
from vllm_gaudi_ucm.ops.quantised_linear.weight import E2M1, QuantisedWeight

E4M3 = torch.float8_e4m3fn
IMPLEMENTATIONS = (*(() if CUDA_RUNS and not GPU else ("reference", "cpu")), *(("cuda",) if CUDA_RUNS else ()))
EXPERTS, HIDDEN, INNER = 4, 64, 96


class Kind(NamedTuple):
    """Of codes. block: of a weight with so many inputs."""

    codes: torch.dtype
    block: tuple[int, int] | None
    kind: CodeKind = "whole"
    bits: int = 8


KINDS = {
    "fp8 per channel": Kind(E4M3, None),
    "fp8 per block": Kind(E4M3, (16, 32)),
    "int8 per channel": Kind(torch.int8, None),
    "8 bits with zeros": Kind(torch.uint8, (1, 32)),
    "4 bits with zeros": Kind(torch.uint8, (1, 32), "uint4", 4),
    "4 bits per channel": Kind(torch.uint8, None, "uint4", 4),
    "mxfp4": Kind(E4M3, (1, 32), "e2m1", 4),
}


def draw(kind: Kind, outputs: int, inputs: int, seed: int) -> QuantisedWeight:
    weight = random_weight(outputs, inputs, kind.block or (1, inputs), kind.codes, kind.bits, seed)
    if kind.kind == "e2m1":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        chosen = torch.randint(16, (outputs, inputs), generator=torch.Generator().manual_seed(seed))
        weight = weight._replace(codes=values[chosen].to(E4M3))
    return weight._replace(scales=weight.scales / weight.codes.float().abs().amax() * 20)


def stack(kind: Kind, outputs: int, inputs: int) -> tuple[ExpertCodes, Tensor]:
    """Codes of all experts, and in float64 what they mean."""
    packer, meant = ExpertPacker(EXPERTS, kind.kind), []
    for number in range(EXPERTS):
        weight = draw(kind, outputs, inputs, seed=100 * outputs + number)
        packer.add(number, weight)
        meant.append(exact(weight))
    return packer.finish(), torch.stack(meant)


def coded(kind: Kind, case: Case) -> tuple[CodedExperts, Case]:
    """Codes in the place of a case's weights, and the case with what they mean, in the dtype of rows."""
    (w13, meant13), (w2, meant2) = stack(kind, 2 * INNER, HIDDEN), stack(kind, HIDDEN, INNER)
    weights = CodedExperts(w13, w2, case.x.dtype, *case.weights[2:])
    return weights, case._replace(weights=ExpertWeights(meant13, meant2, *case.weights[2:]))


def run(case: Case, weights: CodedExperts, implementation: str) -> Tensor:
    device = torch.device(DEVICE if implementation == "cuda" else "cpu")
    biases = (None if bias is None else bias.to(device) for bias in (weights.w13_bias, weights.w2_bias))
    there = CodedExperts(weights.w13.to(device), weights.w2.to(device), weights.dtype, *biases)
    experts = prepare_coded_experts(there, case.spec, implementation=implementation)
    found = mixture_of_experts(*(each.to(device) for each in (case.x, case.ids, case.shares)), experts)
    assert (found.dtype, found.shape) == (case.x.dtype, case.x.shape)
    return found.cpu()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_codes_cuda_and_others(name: str, implementation: str) -> None:
    """Few pairs, which stand apart, and more; experts of other devices. Codes of an expert that nobody chose are NaN
    where there is such a code."""
    for rows, absent, spec in ((1, 0.0, MoeSpec()), (7, 0.4, GPT_OSS), (40, 0.0, MoeSpec())):
        case = make_case(spec, rows, EXPERTS, hidden=HIDDEN, inner=INNER, absent=absent, seed=rows)
        case.ids[case.ids == 3] = 0
        weights, meant = coded(KINDS[name], case)
        weights.w13.scales[3] = weights.w2.scales[3] = torch.nan
        assert_near(meant, run(case, weights, implementation))


@pytest.mark.parametrize("name", ["fp8 per block", "4 bits with zeros", "mxfp4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_of_codes_cuda_and_others(name: str, implementation: str) -> None:
    """Not worse than arithmetic with the exact weights, each rounded to bfloat16."""
    case = make_case(GPT_OSS, 6, EXPERTS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16)
    weights, meant = coded(KINDS[name], case)
    found = run(case, weights, implementation)
    assert found.isfinite().all()
    exactly = oracle(meant)
    plain = (oracle(meant, torch.bfloat16).double() - exactly).abs().max()
    band = 4 * torch.finfo(torch.bfloat16).eps * exactly.abs().max()
    # Triton's interpreter cuts bf16 off where a GPU rounds
    assert (found.double() - exactly).abs().max() <= (4 if CUDA_RUNS and not GPU else 2) * (plain + band)


@pytest.mark.parametrize("name", KINDS)
def test_packing_loses_nothing(name: str) -> None:
    """Memory of codes, of all experts, beside that of plain weights in bfloat16."""
    kind = KINDS[name]
    codes, meant = stack(kind, 2 * INNER, HIDDEN)
    for number in range(EXPERTS):
        assert torch.equal(exact(codes.expert(number)), meant[number])
        assert torch.equal(codes.write_out(number, torch.float32), meant[number].float())
    elements = EXPERTS * 2 * INNER * HIDDEN
    assert codes.codes.nbytes == elements * kind.bits // 8
    assert codes.nbytes < 2 * elements * (0.5 if kind.bits == 4 else 0.8)


@pytest.mark.parametrize("group", [2, 32, 128])
def test_every_code_of_four_bits(group: int) -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat(16).view(2, 128)
    assert torch.equal(unpack_codes(pack_codes(numbers, "uint4", group), "uint4", group), numbers)
    floats = torch.tensor([*E2M1, *(-value for value in E2M1)])[numbers.int()].to(E4M3)
    found = unpack_codes(pack_codes(floats, "e2m1", group), "e2m1", group)
    assert torch.equal(found.view(torch.uint8), floats.view(torch.uint8))


def test_which_codes_stay() -> None:
    """On a CPU they are written out each time, unless a GPU's kernels take them; inputs in odd groups are."""
    case = make_case(MoeSpec(), 3, EXPERTS, hidden=HIDDEN, inner=INNER)
    weights, _ = coded(KINDS["mxfp4"], case)
    assert not are_codes_enough(weights, MoeSpec())
    assert MOE.make("cuda").takes_codes(weights)
    odd = [stack(Kind(torch.uint8, (1, 16), "uint4", 4), *sizes)[0] for sizes in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    assert odd[0].codes.nbytes == EXPERTS * INNER * HIDDEN
    groups = CodedExperts(odd[0], odd[1], torch.float32)
    assert not MOE.make("cuda").takes_codes(groups)
    with pytest.raises(ValueError, match=r"in blocks of \(1, 16\).*expected blocks of a multiple of 32 inputs"):
        MOE.make("cuda").prepare_codes(groups, MoeSpec(weights=CODES))
    with pytest.raises(ValueError, match="expected \\[experts, 2 \\* inner"):
        prepare_coded_experts(groups._replace(w2=odd[0]), MoeSpec())
    with pytest.raises(ValueError, match="w13_bias is missing"):
        prepare_coded_experts(groups, GPT_OSS)
