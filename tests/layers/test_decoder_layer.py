"""Which decoder layers of the demo model take the short way, and that both ways agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_gaudi_ucm.layers.decoder_layer import FewRowsForward, fuse_decoder_layers


class Part(nn.Module):
    """Neither a decoder layer nor made like one."""


def test_other_modules_are_left_alone() -> None:
    model = nn.Sequential(Part(), nn.Linear(2, 2))
    assert fuse_decoder_layers(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


class Halves:
    """Says what it was asked."""

    def __init__(self, covers: bool) -> None:
        self._covers = covers

    def covers(self, *_: torch.Tensor) -> bool:
        return self._covers

    def before_attention(self, hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual += hidden
        return torch.cat((hidden, hidden + 1, hidden + 2), 1)

    def after_attention(self, attention: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return attention * 2


@pytest.mark.parametrize(("covers", "first"), [(True, False), (False, False), (True, True)])
def test_steps_that_are_not_covered_take_the_original_way(covers: bool, first: bool) -> None:
    forward = FewRowsForward.__new__(FewRowsForward)
    forward._original = lambda positions, hidden, residual: ("original", residual)
    forward._attention = lambda query, key, value: query + 10 * key + 100 * value
    forward._split = [4, 4, 4]
    forward._halves = Halves(covers)  # type: ignore[assignment]
    hidden, residual = torch.ones(2, 4), None if first else torch.zeros(2, 4)
    out, left = forward(torch.arange(2), hidden, residual)
    if covers and not first:
        assert (out == 2 * (1 + 20 + 300)).all()
        assert left is residual
        assert (left == 1).all()
    else:
        assert out == "original"
