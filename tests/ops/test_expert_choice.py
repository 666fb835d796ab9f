"""Which experts rows take, against float64: by torch's operators, and by the kernel on a GPU or in the process of
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.ops.moe.choice import choose_experts
from vllm_gaudi_ucm.ops.moe.impl.cuda import choice as cuda_choice

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXPERTS = (8, 100)


@pytest.fixture(params=["torch", *(["cuda"] if CUDA_RUNS else [])], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cuda_choice, "can_choose", lambda *_: False)
    return str(request.param)


def draw(rows: int, experts: int) -> torch.Tensor:
    """Without equal ones."""
    random = torch.Generator().manual_seed(experts)
    return (
        torch.stack([torch.randperm(4 * experts, generator=random)[:experts] for _ in range(rows)]) * (1.5 / experts)
        - 3
    )


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_the_best_and_their_weights(experts: int, score: str, with_bias: bool, renormalise: bool) -> None:
    logits, bias = draw(5, experts), torch.linspace(0.3, -0.3, experts).roll(3) if with_bias else None
    exact = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    expected = (exact if bias is None else exact + bias.double()).topk(3, -1).indices
    shares = exact.gather(1, expected)
    shares = 2.5 * (shares / shares.sum(1, keepdim=True) if renormalise else shares)
    # rows of a larger tensor
    given = torch.full((5, experts + 3), torch.nan, device=DEVICE)
    given[:, :experts] = logits
    on_device = None if bias is None else bias.to(DEVICE)
    weights, ids = choose_experts(given[:, :experts], 3, score, renormalise, on_device, 2.5, torch.int64)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(weights.cpu().double(), shares, rtol=1e-5, atol=1e-7)


def test_half_precision_and_no_rows() -> None:
    logits = draw(4, 8).to(DEVICE)
    plain, narrow = (choose_experts(given, 2, "softmax", True) for given in (logits, logits.to(torch.bfloat16)))
    assert narrow[1].dtype == torch.int32
    assert torch.equal(plain[1], narrow[1])
    torch.testing.assert_close(plain[0], narrow[0], rtol=0.02, atol=0.01)
    assert [tuple(each.shape) for each in choose_experts(logits[:0], 2, "softmax", True)] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_what_is_no_number_spoils_its_own_row(score: str) -> None:
    """Its experts are some of those that there are: a row without any would be zeros, and nobody would notice."""
    logits = draw(3, 100).to(DEVICE)
    logits[1, 40] = torch.nan
    weights, ids = choose_experts(logits, 4, score, True)
    assert weights[[0, 2]].isfinite().all()
    assert weights[1].isnan().all()
    assert ((ids >= 0) & (ids < 100)).all()
    assert all(len(row.unique()) == 4 for row in ids)


def test_experts_that_a_mask_takes_away() -> None:
    logits = draw(2, 8).to(DEVICE)
    logits[:, ::2] = -torch.inf
    weights, ids = choose_experts(logits, 5, "softmax", False)
    assert weights.isfinite().all()
    assert not weights[:, 4].any()
    assert all(len(row.unique()) == 5 for row in ids)
