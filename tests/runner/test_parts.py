"""The parts of a worker as one: a hook calls the parts that define it, in their order."""

from __future__ import annotations

from typing import Any, cast

from vllm_gaudi_ucm.observability.step_clock import StepClock
from vllm_gaudi_ucm.runner.parts import HOOKS, AllParts, WorkerPart

STEP: Any = object()


class Named(WorkerPart):
    """Writes its calls to a list that all parts share."""

    def __init__(self, name: str, calls: list[tuple[object, ...]]) -> None:
        self.name, self.calls = name, calls


class Begins(Named):
    def begin_step(self, scheduler_output: Any) -> None:
        self.calls.append((self.name, "begin_step", scheduler_output))


class BeginsAndUpdates(Begins):
    def requests_updated(self, scheduler_output: Any, clock: StepClock) -> None:
        self.calls.append((self.name, "requests_updated", scheduler_output, clock))


def test_a_hook_calls_the_parts_that_define_it_in_their_order() -> None:
    calls: list[tuple[object, ...]] = []
    parts = AllParts([BeginsAndUpdates("a", calls), Named("b", calls), Begins("c", calls)])
    clock = StepClock()
    parts.begin_step(STEP)
    parts.requests_updated(STEP, clock)
    parts.end_step()
    assert calls == [("a", "begin_step", STEP), ("c", "begin_step", STEP), ("a", "requests_updated", STEP, clock)]


def test_a_hook_of_a_single_part_is_its_method() -> None:
    part = BeginsAndUpdates("a", [])
    assert cast(Any, AllParts([Named("b", []), part])).requests_updated == part.requests_updated


def test_every_hook_may_be_called_without_parts() -> None:
    parts = AllParts([])
    assert "before_step" in HOOKS
    assert "close" in HOOKS
    for name in HOOKS:
        assert getattr(parts, name)() is None
