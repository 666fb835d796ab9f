"""Helpers of `test_moe.py` that other tests use, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec

GPU = torch.cuda.is_available()


DEVICE = "cuda" if GPU else "cpu"


GPT_OSS = MoeSpec(interleaved=True, alpha=1.702, beta=1.0, limit=7.0, bias=True)


class Case(NamedTuple):
    """Rows that took experts, and their weights; all on the CPU."""

    x: Tensor
    ids: Tensor
    shares: Tensor
    weights: ExpertWeights
    spec: MoeSpec


def make_case(
    spec: MoeSpec,
    rows: int = 5,
    experts: int = 4,
    chosen: int = 2,
    hidden: int = 16,
    inner: int = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    absent: float = 0.0,
) -> Case:
    """absent: of the pairs, how many have an expert that is not here."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    ids = torch.rand(rows, experts, generator=random).topk(chosen).indices
    gone = torch.rand(rows, chosen, generator=random) < absent
    ids = torch.where(gone, torch.where(ids % 2 == 0, -1, experts + ids), ids)
    weights = ExpertWeights(draw(experts, 2 * inner, hidden), draw(experts, hidden, inner) / 4)
    if spec.bias:
        weights = weights._replace(w13_bias=draw(experts, 2 * inner), w2_bias=draw(experts, hidden))
    return Case(draw(rows, hidden), ids, torch.rand(rows, chosen, generator=random), weights, spec)


def oracle(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    """Row by row, in float64; in another dtype for the error that honest arithmetic has there."""
    spec = case.spec
    w13, w2, b13, b2 = (None if each is None else each.to(dtype) for each in case.weights)
    assert w13 is not None
    assert w2 is not None
    out = torch.zeros(case.x.shape, dtype=dtype)
    for row, (x, ids) in enumerate(zip(case.x.to(dtype), case.ids.tolist(), strict=True)):
        for number, share in zip(ids, case.shares[row].to(dtype), strict=True):
            if not 0 <= number < len(w13):
                continue
            both = (w13[number] @ x) if b13 is None else w13[number] @ x + b13[number]
            gates, up = (both[::2], both[1::2]) if spec.interleaved else both.chunk(2)
            if spec.limit is not None:
                gates, up = gates.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
            if spec.form == "silu":
                passed = gates / (1 + torch.exp(-spec.alpha * gates))
            else:
                name = "tanh" if spec.form == "gelu_tanh" else "none"
                passed = torch.nn.functional.gelu(gates, approximate=name)
            found = w2[number] @ (passed * (up + spec.beta))
            out[row] += share * (found if b2 is None else found + b2[number])
    return out


def assert_near(case: Case, found: Tensor) -> None:
    """Error <= 2 x (error of row-by-row arithmetic in the same dtype + an epsilon band).

    Triton's interpreter (3.9) cuts bf16 off where a GPU rounds, which is twice the error.
    """
    assert found.isfinite().all()
    exact = oracle(case)
    plain = (oracle(case, case.x.dtype).double() - exact).abs().max()
    band = 4 * torch.finfo(case.x.dtype).eps * exact.abs().max().clamp(min=1)
    cut = case.x.dtype == torch.bfloat16 and CUDA_RUNS and not GPU
    assert (found.double() - exact).abs().max() <= (4 if cut else 2) * (plain + band)
