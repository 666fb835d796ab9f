"""Compile mode (PT_HPU_LAZY_MODE=0): torch.compile with `hpu_backend` counts graphs and obeys the same constraints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sim.regions import compiled


def test_one_graph_per_shape(card: Any, compilations: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        position = torch.arange(x.shape[0], device=x.device)
        return (x.unflatten(1, (3, 1)) * 2).flatten(1) + torch.zeros(3, device="hpu") + position[:, None]

    run = compiled(forward)
    found = []
    for rows in (1, 2, 1, 2):
        x = torch.rand(rows, 3).to("hpu")
        found.append(compilations(lambda x=x: run(x)))
        assert torch.equal(run(x), forward(x))
        assert run(x).device == torch.device("hpu", 0)
    assert found == [1, 1, 0, 0]
    assert card.compiled_graphs == 2


def test_without_graph_each_operator_is_a_recipe(card: Any) -> None:
    x = torch.ones(3, device="hpu")
    launches = card.launches
    x * 2 + 1
    assert card.launches == launches + 2


def test_constraints(forbidden: Any) -> None:
    x = torch.ones(3, device="hpu")
    pick = compiled(lambda x, i: x.index_select(0, i) + 1)
    assert pick(x, torch.tensor([2], device="hpu")).tolist() == [2]
    with forbidden("index 3 is out of range"):
        pick(x, torch.tensor([3], device="hpu"))


def test_unknown_options() -> None:
    with pytest.raises(Exception, match=r"options .*unknown_option.* are unknown"):
        compiled(lambda x: x + 1, unknown_option=1)(torch.ones(3, device="hpu"))
