"""The part of a worker that carries out the scheduler's orders about states of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.kv_cache.api import copy_blocks
from vllm_gaudi_ucm.protocol.memory_orders import memory_orders_of
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.memory.swap_space import SwapSpace
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class KeepsStates(Protocol):
    """Plans steps of layers with a state, some of which are kept for requests that begin alike."""

    def row_behind(self, row: int, tokens: int) -> int:
        """Returns the row of the state behind so many tokens of a request."""
        ...

    def begin_step(self, reads: Mapping[int, int], keeps: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Takes the orders of a step, by rows of the request table.

        reads: the kept state with which a request begins. keeps: (tokens, number): where the state behind so many
        tokens of a request is kept.
        """
        ...


class MovesStates(Protocol):
    """Says in which rows of a group's tensors the states of a request are."""

    def leave(self, row: int, number: int) -> NDArray[np.int64]:
        """Returns the rows of a request whose states are copied away, to the place with this number."""
        ...

    def come_back(self, row: int, number: int) -> NDArray[np.int64]:
        """Returns the rows of a request to which they are copied back."""
        ...


class SwappedStates(NamedTuple):
    """Holds the states of one kind, and host memory for preempted requests' states. A place there is for one row."""

    planner: MovesStates
    space: SwapSpace

    def store(self, row: int, number: int) -> None:
        self.space.store([(source, place) for place, source in self._places(self.planner.leave(row, number), number)])

    def load(self, row: int, number: int) -> None:
        self.space.load(self._places(self.planner.come_back(row, number), number))

    @staticmethod
    def _places(rows: NDArray[np.int64], number: int) -> list[tuple[int, int]]:
        """Returns (place in host memory, row)."""
        return [(number * len(rows) + index, row) for index, row in enumerate(rows.tolist())]


class KeptStates(NamedTuple):
    """States of one kind, some of which are kept. states: tensors [rows, ...], grouped by equal shape."""

    planner: KeepsStates
    states: Sequence[Sequence[torch.Tensor]]
    device: Device

    def copy(self, row: int, tokens: int, number: int) -> None:
        """Keeps the state behind so many tokens of a request under a number."""
        self._copy(self.planner.row_behind(row, tokens), number)

    def warm_up(self) -> None:
        """Copies the dummy's state to a number that is not used yet, so that a Gaudi compiles the copy now, and not
        during a request.
        """
        self._copy(DUMMY_BLOCK, DUMMY_BLOCK + 1)

    def _copy(self, source: int, target: int) -> None:
        self.device.end_recipe()
        for together in self.states:
            copy_blocks(together, torch.tensor([source]), torch.tensor([target]))
        self.device.end_recipe()


class StateSteps(WorkerPart):
    """Carries out the orders. kept: each kind whose states are kept. swapped: each kind that can be swapped."""

    def __init__(self, requests: RequestTable, kept: Sequence[KeptStates], swapped: Sequence[SwappedStates]) -> None:
        self._requests = requests
        self._kept = kept
        self._swapped = swapped

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Copies states of preempted requests, before their rows are given to others."""
        orders = memory_orders_of(scheduler_output)
        for request_id, number in () if orders is None else orders.state_outs:
            for one in self._swapped:
                one.store(self._requests.requests[request_id].row, number)

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        orders = memory_orders_of(scheduler_output)
        if orders is None:
            return
        rows = self._requests.requests
        for number, request_id in orders.state_ins:
            for one in self._swapped:
                one.load(rows[request_id].row, number)
        reads = {rows[request_id].row: number for request_id, number in orders.state_reads.items()}
        keeps: dict[int, list[tuple[int, int]]] = {}
        for request_id, tokens, number in orders.state_keeps:
            keeps.setdefault(rows[request_id].row, []).append((tokens, number))
        for kind in self._kept:
            for request_id, tokens, number in orders.state_copies:
                kind.copy(rows[request_id].row, tokens, number)
            kind.planner.begin_step(reads, keeps)

    def close(self) -> None:
        for one in self._swapped:
            one.space.close()
