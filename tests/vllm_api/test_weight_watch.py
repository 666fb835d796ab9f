"""What counts as a tensor that a checkpoint lacks, for models whose own code makes a parameter of one."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.vllm_api.loading import WeightWatch


class Classifier(nn.Module):
    """A head that gets its bias from the checkpoint, if this has one, as vLLM's classifiers of decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            if name == "score.bias":
                self.score.bias = nn.Parameter(tensor)
                continue
            self.get_parameter(name).data.copy_(tensor)
            names.add(name)
        return names


def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    def fill(one: Any, _: Any) -> None:
        one.load_weights(tensors.items())

    WeightWatch(model).load(fill, SimpleNamespace(model="a checkpoint"))  # type: ignore[arg-type]  # only its name


def test_a_bias_that_the_model_makes_is_not_missing_when_loaded_and_loaded_again() -> None:
    model = Classifier()
    for value in (1.0, 2.0):
        load(model, {"score.weight": torch.zeros(2, 4), "score.bias": torch.full((2,), value)})
        assert model.score.bias.tolist() == [value, value]


def test_a_weight_is_missing_next_to_such_a_bias() -> None:
    with pytest.raises(ValueError, match=r"a checkpoint lacks tensors that the model needs: score\.weight\. "):
        load(Classifier(), {"score.bias": torch.ones(2)})


def test_a_bias_that_is_left_out_the_second_time_is_missing() -> None:
    model = Classifier()
    load(model, {"score.weight": torch.zeros(2, 4), "score.bias": torch.ones(2)})
    with pytest.raises(ValueError, match=r"score\.bias"):
        load(model, {"score.weight": torch.zeros(2, 4)})
