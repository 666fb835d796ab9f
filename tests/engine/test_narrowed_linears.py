"""The comparison of rounded rows follows numbers in the middle of two 8-bit floats, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.narrowed_linears import NarrowedModel
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer

LARGEST = 240.0
# 8-bit floats between 16 and 32 are 2 apart
ROW = [LARGEST, 17.0]


class OneProduct(ReferenceModel):
    """A model of one linear layer, whose prompt is a row."""

    def __init__(self) -> None:
        product = nn.Linear(2, 4, bias=False)
        product.weight.data = torch.tensor([[0.0, 0.1], [0.01, 0.0], [0.0, -0.2], [0.0, 0.0]])
        self.model: Any = nn.ModuleDict({"a_proj": product})

    @torch.inference_mode()
    def after(self, prompt: Any, tokens: Any) -> torch.Tensor:
        return torch.log_softmax(self.model["a_proj"](torch.tensor([prompt])), -1).expand(len(tokens), -1)


def answer(row: list[float]) -> Answer:
    """Returns what an engine answers that rounds to this row."""
    logprobs = OneProduct().after(row, [0])[0]
    token = int(logprobs.argmax())
    return Answer([token], [float(logprobs[token])], [1.0], 0)


@pytest.mark.parametrize(("rounded", "others"), [(16.0, 0), (18.0, 1)])
def test_a_number_in_the_middle_may_be_either(rounded: float, others: int) -> None:
    model = NarrowedModel(OneProduct(), "a_proj", LARGEST)
    assert model.assert_greedy([ROW], [answer([LARGEST, rounded])]) == others


def test_another_number_is_found() -> None:
    with pytest.raises(AssertionError):
        NarrowedModel(OneProduct(), "a_proj", LARGEST).assert_greedy([ROW], [answer([LARGEST, 20.0])])


def test_a_number_beyond_the_middle_has_one_way() -> None:
    with pytest.raises(AssertionError):
        NarrowedModel(OneProduct(), "a_proj", LARGEST).assert_greedy([[LARGEST, 17.1]], [answer([LARGEST, 16.0])])
