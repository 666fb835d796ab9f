"""Stages of device work: cut into recipes on the device, and hashed where that is asked for."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pytest
import torch

from vllm_gaudi_ucm.execution.recipe_stages import RecipeStages
from vllm_gaudi_ucm_tools.recipes.recorder import RecipeError

Check = Literal["off", "count", "fail"]


class Device:
    """Counts the cuts, and says what ran before each."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def end_recipe(self) -> None:
        self.events.append("cut")


class Staged:
    """Stages on a fake device; `run(n)` executes a recipe that depends on n."""

    def __init__(self, check: Check) -> None:
        self.device = Device()
        self.new = 0
        device: Any = self.device
        self.stages = RecipeStages(device, check, "cpu", self._on_new)

    def _on_new(self) -> None:
        self.new += 1

    def run(self, size: int) -> None:
        with self.stages("forward"):
            torch.ones(size).add_(1)
            self.device.events.append(f"run {size}")


@pytest.mark.parametrize("check", ["off", "count", "fail"])
def test_a_stage_is_cut_from_what_comes_before_and_after(check: Check) -> None:
    staged = Staged(check)
    staged.run(3)
    staged.run(4)
    assert staged.device.events == ["cut", "run 3", "cut", "cut", "run 4", "cut"]


def test_without_a_check_nothing_is_hashed_or_new() -> None:
    staged = Staged("off")
    staged.stages.seal()
    with staged.stages.warming():
        staged.run(3)
    staged.run(5)
    assert (staged.stages.new_recipes, staged.new) == (0, 0)


def test_a_recipe_first_seen_after_warm_up_is_counted_once_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: B1"""
    staged = Staged("count")
    staged.run(3)
    staged.stages.seal()
    # pytest listens at the root and at loggers that do not propagate: at one place only, whether vLLM is set up or not
    logger = logging.getLogger("vllm.gaudi_ucm.runner.recipe_stages")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    for size in (3, 5, 5, 3):
        staged.run(size)
    logger.removeHandler(caplog.handler)
    (message,) = caplog.messages
    assert message.startswith("A new recipe after warm-up: recipe 'forward' of 2 operators")
    assert (staged.stages.new_recipes, staged.new) == (1, 1)


def test_what_is_warmed_beside_serving_is_not_new() -> None:
    """covers: B6"""
    staged = Staged("fail")
    staged.stages.seal()
    with staged.stages.warming():
        staged.run(5)
    staged.run(5)
    assert (staged.stages.new_recipes, staged.new) == (0, 0)


def test_a_check_that_fails_names_the_stage() -> None:
    staged = Staged("fail")
    staged.stages.seal()
    with pytest.raises(RecipeError, match="recipe 'forward' of 2 operators was first seen after warm-up"):
        staged.run(3)
    assert (staged.stages.new_recipes, staged.new) == (1, 1)
