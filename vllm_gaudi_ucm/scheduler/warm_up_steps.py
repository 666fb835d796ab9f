"""Makes all workers of an engine warm graphs in gaps between requests, one with each step that has no tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.warm_up.idle_rule import DEFAULT_RULE, IdleRule
from vllm_gaudi_ucm.protocol.warm_up_orders import order_warm_up, warm_up_state_of
from vllm_gaudi_ucm.scheduler.parts import SchedulerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import Scheduler
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

# A request that arrives meanwhile waits this long; workers get a step without work this often.
PAUSE_SECONDS = 0.005


class WarmUpSteps(SchedulerPart):
    """Keeps the engine's loop running without requests while graphs are cold; a step tells workers when to warm the
    next.

    A single worker warms graphs in its own thread (`IdleWarmUp`), by the same rule.

    Args:
        scheduler: vLLM's scheduler, whose requests end a gap.
        is_ending: returns whether the engine was asked to end.
        rule: how long the engine must have been idle.
        clock, sleep: in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        is_ending: Callable[[], bool],
        rule: IdleRule = DEFAULT_RULE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(scheduler)
        self._is_ending = is_ending
        self._rule = rule
        self._clock = clock
        self._sleep = sleep
        self._idle_since = clock()
        self._last_seconds = 0.0
        self._all_warm = False

    @property
    def has_work(self) -> bool:
        return not self._all_warm and not self._is_ending()

    def scheduled(self, scheduler_output: SchedulerOutput, reset: Collection[str]) -> None:
        if self._scheduler.has_unfinished_requests() or scheduler_output.total_num_scheduled_tokens:
            self._idle_since = self._clock()
        elif self.has_work:
            wait = self._rule.seconds_to_wait(self._last_seconds, self._clock() - self._idle_since)
            if wait:
                self._sleep(min(wait, PAUSE_SECONDS))
            else:
                order_warm_up(scheduler_output)

    def after_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        state = warm_up_state_of(output)
        if state is not None:
            self._all_warm, self._last_seconds = state.cold == 0, state.seconds
