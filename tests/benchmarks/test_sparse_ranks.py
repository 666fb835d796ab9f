"""The benchmark of choices over ranks: what it counts where the answer is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import all_methods
from benchmarks.sparse_ranks import judge, parts
from benchmarks.sparse_step import Step

TOKENS, BLOCK, DIM = 160, 8, 16
BUDGETS = [Budget(0.3), Budget(1.0)]
(ORACLE,) = (method for method in all_methods() if method.name == "oracle")


def make_step(different: bool) -> Step:
    """Four rows of two ranks with two heads each, whose heads are equal or not."""
    random = torch.Generator().manual_seed(3)
    query, keys = torch.randn(4, 2, DIM, generator=random), torch.randn(TOKENS, 1, DIM, generator=random)
    others = (torch.randn(4, 2, DIM, generator=random), torch.randn(TOKENS, 1, DIM, generator=random))
    second = others if different else (query, keys)
    contexts = torch.arange(TOKENS - 3, TOKENS + 1)
    return Step(0, torch.cat((query, second[0]), 1) * 2, torch.cat((keys, second[1]), 1), contexts, 0.25, BLOCK)


def test_a_rank_has_its_heads() -> None:
    step = make_step(different=True)
    for rank, part in enumerate(parts(step, 2)):
        assert torch.equal(part.query, step.query[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(part.keys, step.keys[:, rank : rank + 1])


def test_ranks_with_equal_heads_choose_what_all_heads_choose() -> None:
    for shared, own, same in judge(make_step(different=False), ORACLE, BUDGETS, ranks=2):
        assert own == pytest.approx(shared, rel=1e-5)
        assert same == 1


def test_a_rank_that_chooses_for_itself_holds_more_of_its_own_attention() -> None:
    (few, everything) = judge(make_step(different=True), ORACLE, BUDGETS, ranks=2)
    assert few[1] > few[0]
    assert few[2] < 1
    assert everything == pytest.approx((1, 1, 1), rel=1e-5)
