"""Experts that few rows chose are gathered on the simulated card: as exact as by its operator, and where it pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.moe import GPT_OSS, assert_near, make_case
from vllm_gaudi_ucm.ops.moe.api import mixture_of_experts, prepare_experts
from vllm_gaudi_ucm.ops.moe.impl.hpu import experts as hpu_experts
from vllm_gaudi_ucm.ops.moe.impl.hpu.gathered import MOST_BYTES, gathering_pays
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec

PT_HPU_LAZY_MODE = "0"
QWEN3_30B = (128, 768, 2048)
MIXTRAL = (8, 14336, 4096)


def on_meta(count: int, inner: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    return ExpertWeights(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))


@pytest.mark.parametrize(
    ("sizes", "chosen", "most"),
    # small experts, of which there are many, for few rows; one of Mixtral's is as large as a copy may be
    [(QWEN3_30B, 8, 3), (MIXTRAL, 2, 0), ((60, 1408, 2048), 4, 3), ((128, 2880, 2880), 4, 1)],
)
def test_few_rows_of_many_small_experts_gather(sizes: tuple[int, int, int], chosen: int, most: int) -> None:
    weights = on_meta(*sizes)
    assert [rows for rows in range(1, 65) if gathering_pays(rows, chosen, weights)] == list(range(1, most + 1))
    copied = most * chosen * sum(each[0].numel() * 2 for each in weights[:2])  # type: ignore[index]  # no biases
    assert copied <= MOST_BYTES


@pytest.mark.parametrize("spec", [MoeSpec(), MoeSpec("gelu_tanh"), GPT_OSS], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_gathered_experts_are_those_of_the_operator(
    spec: MoeSpec, compiled: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pads, experts of another device, and NaN in experts that no row chose."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hpu_experts, "gathering_pays", lambda *given: asked.append(given) or pays)
    case = make_case(spec, rows=3, experts=9, absent=0.3, seed=2)
    for number in set(range(9)) - set(case.ids.flatten().tolist()):
        # clamped numbers of absent experts read the first and the last one
        case.weights.w13[number] = torch.nan
    weights = ExpertWeights(*(None if each is None else each.to("hpu") for each in case.weights))
    experts = prepare_experts(weights, spec)
    assert experts.implementation.name == "hpu"

    def run(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return mixture_of_experts(x, ids, shares, experts)

    given = [part.to("hpu") for part in (case.x, case.ids, case.shares)]
    found = (torch.compile(run, backend="hpu_backend", dynamic=False) if compiled else run)(*given).cpu()
    assert_near(case, found)
    assert asked
