"""When the scheduler has several workers warm a graph: in gaps that have lasted, and never beside requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_gaudi_ucm.graphs.warm_up.idle_rule import IdleRule
from vllm_gaudi_ucm.protocol.warm_up_orders import WarmUpState, attach_warm_up_state, orders_warm_up
from vllm_gaudi_ucm.scheduler.warm_up_steps import PAUSE_SECONDS, WarmUpSteps


class _Setting:
    def __init__(self) -> None:
        self.now = 0.0
        self.requests = False
        self.ending = False
        scheduler: Any = SimpleNamespace(has_unfinished_requests=lambda: self.requests)
        rule = IdleRule(least=0.05, most=2.0)
        self.part = WarmUpSteps(scheduler, lambda: self.ending, rule, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds <= PAUSE_SECONDS
        self.now += seconds

    def step(self, tokens: int = 0, state: WarmUpState | None = None) -> bool:
        """Whether the step has an order; workers answer one with `state`."""
        step: Any = SimpleNamespace(total_num_scheduled_tokens=tokens)
        self.part.scheduled(step, ())
        output: Any = SimpleNamespace()
        if orders_warm_up(step) and state is not None:
            attach_warm_up_state(output, state)
        self.part.after_output(step, output)
        return orders_warm_up(step)

    def steps_until_order(self, state: WarmUpState) -> int:
        return next(count for count in range(1000) if self.step(state=state))


def test_a_gap_must_have_lasted() -> None:
    setting = _Setting()
    assert 9 <= setting.steps_until_order(WarmUpState(cold=5, seconds=0.4)) <= 11
    # of this gap 0.05 s have passed, and the next graph takes about 0.4
    assert 68 <= setting.steps_until_order(WarmUpState(cold=4, seconds=0.4)) <= 72
    assert setting.step(state=WarmUpState(cold=3, seconds=0.4))
    setting.requests = True
    assert not any(setting.step(tokens=3) for _ in range(20))
    # one that waits for its blocks has no tokens, and is no gap either
    assert not any(setting.step() for _ in range(20))
    setting.requests = False
    assert 78 <= setting.steps_until_order(WarmUpState(cold=2, seconds=9.0)) <= 82
    assert 315 <= setting.steps_until_order(WarmUpState(cold=1, seconds=9.0)) <= 401


def test_it_ends_with_the_last_graph() -> None:
    setting = _Setting()
    assert setting.part.has_work
    setting.steps_until_order(WarmUpState(cold=0, seconds=0.4))
    assert not setting.part.has_work
    setting.now += 100
    assert not setting.step()


def test_an_engine_that_ends_warms_nothing() -> None:
    setting = _Setting()
    setting.now, setting.ending = 100.0, True
    assert not setting.part.has_work
    assert not setting.step()
