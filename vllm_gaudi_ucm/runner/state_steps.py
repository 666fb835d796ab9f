"""The part of a worker that tells layers with a state which kept states a step reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm_gaudi_ucm.protocol.memory_orders import memory_orders_of
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class KeepsStates(Protocol):
    """Plans steps of layers with a state, some of which are kept for requests that begin alike."""

    def begin_step(self, reads: Mapping[int, int], keeps: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Takes the orders of a step, by rows of the request table.

        reads: the kept state with which a request begins. keeps: (tokens, number): where the state behind so many
        tokens of a request is kept.
        """
        ...


class StateSteps(WorkerPart):
    """Passes the scheduler's orders on. planners: of each kind of state."""

    def __init__(self, requests: RequestTable, planners: Sequence[KeepsStates]) -> None:
        self._requests = requests
        self._planners = planners

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        orders = memory_orders_of(scheduler_output)
        if orders is None:
            return
        rows = self._requests.requests
        reads = {rows[request_id].row: number for request_id, number in orders.state_reads.items()}
        keeps: dict[int, list[tuple[int, int]]] = {}
        for request_id, tokens, number in orders.state_keeps:
            keeps.setdefault(rows[request_id].row, []).append((tokens, number))
        for planner in self._planners:
            planner.begin_step(reads, keeps)
