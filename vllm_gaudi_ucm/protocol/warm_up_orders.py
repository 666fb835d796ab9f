"""When several workers warm a graph: with a step without tokens, so that each does it between the same two steps.

Graphs hold collectives. A worker that warmed one on its own would wait for others that run another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

_ORDER = "ucm_warm_up"
_STATE = "ucm_warm_up_state"


class WarmUpState(msgspec.Struct, frozen=True):
    """After an order: graphs that are still cold, and the seconds that the last one took."""

    cold: int
    seconds: float = 0.0


def order_warm_up(scheduler_output: SchedulerOutput) -> None:
    """Has every worker warm one graph with this step."""
    setattr(scheduler_output, _ORDER, True)


def orders_warm_up(scheduler_output: SchedulerOutput) -> bool:
    """True if a graph is to be warmed with this step."""
    return getattr(scheduler_output, _ORDER, False)


def attach_warm_up_state(output: ModelRunnerOutput, state: WarmUpState) -> None:
    """Sends the scheduler the remaining work of an order."""
    setattr(output, _STATE, state)


def warm_up_state_of(output: ModelRunnerOutput) -> WarmUpState | None:
    """Returns the state of the warm-up; None if the step had no order."""
    state: WarmUpState | None = getattr(output, _STATE, None)
    return state
