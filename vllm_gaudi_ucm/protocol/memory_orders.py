"""Orders from the scheduler to every worker about blocks of the KV cache, before a step: plain data.

Copies of blocks for one request travel in vLLM's own field, `SchedulerOutput.kv_cache_block_copies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

_ATTRIBUTE = "ucm_memory_orders"
_LINK = "ucm_link_speed"


BlockMoves = list[tuple[int, int]]
"""(from, to) of blocks; no block is both, or a target twice."""


class MemoryTotals(msgspec.Struct):
    """Totals since the start.

    copies, copied_tokens: blocks copied for a request that continues to write them, and their tokens, which are not
        computed again. copy_waits: steps that a request has waited for a block to copy.
    admission_waits: answers of `ucm.scheduler.admission` that a request may not begin yet.
    swapped_out, swapped_in: blocks of preempted requests that were copied to host memory, and back; swap_out_bytes,
        swap_in_bytes: their bytes. swap_refusals: preempted requests for which host memory had no room.
    recomputed_tokens: tokens computed again, because their request was preempted.
    moves: blocks that compaction has copied. density: now, blocks in use / (highest id in use + 1); None without
        compaction.
    """

    copies: int = 0
    copied_tokens: int = 0
    copy_waits: int = 0
    admission_waits: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    swap_refusals: int = 0
    recomputed_tokens: int = 0
    moves: int = 0
    density: float | None = None

    def count_density(self, density: float) -> None:
        """Sets `density`, which is a figure of now."""
        self.density = density


class LinkSpeed(msgspec.Struct, frozen=True):
    """Measured copies of blocks, in bytes per second: from the device to host memory, and back.

    request_bytes: bytes of the states of a request, which are copied with its blocks; 0 if no layer keeps a state.
    """

    to_host: float
    from_host: float
    request_bytes: int = 0

    def slowest(self, least: Callable[[int], int]) -> LinkSpeed:
        """Returns the slowest speed of several workers. least: the smallest value of all, called for both alike."""
        return LinkSpeed(float(least(int(self.to_host))), float(least(int(self.from_host))), self.request_bytes)


class MemoryRates(msgspec.Struct, frozen=True):
    """The measured rates; 0: not measured yet.

    prefill: tokens per second of steps with prompts. to_host, from_host: see LinkSpeed.
    """

    prefill: float = 0.0
    to_host: float = 0.0
    from_host: float = 0.0

    @property
    def are_known(self) -> bool:
        return min(self.prefill, self.to_host, self.from_host) > 0


class MemoryOrders(msgspec.Struct):
    """The orders of a step, in the order in which they are carried out before any other write of the step.

    totals, rates: for the worker's metrics.
    moves: blocks that have another place from this step on; one list after the other. Block tables that the worker
        knows follow; those of the step's message, and all other orders, have the new ids.
    swap_outs: (block, slot in host memory) to copy. swap_ins: (slot, block), behind these.
    state_outs: (request id, number): the states of a preempted request leave for this place in host memory.
    state_ins: (number, request id): the states of a request that resumes come back, behind these.
    state_copies: (request id, tokens, number): the state behind so many tokens, which the request has in its slot, is
        kept under this number from now on.
    state_reads: the number of the kept state with which a request begins, by request id.
    state_keeps: (request id, tokens, number): the state behind so many tokens is kept under this number in this step.
    """

    totals: MemoryTotals = msgspec.field(default_factory=MemoryTotals)
    rates: MemoryRates = MemoryRates()
    moves: list[BlockMoves] = []
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    state_outs: list[tuple[str, int]] = []
    state_ins: list[tuple[int, str]] = []
    state_copies: list[tuple[str, int, int]] = []
    state_reads: dict[str, int] = {}
    state_keeps: list[tuple[str, int, int]] = []


def attach_memory_orders(scheduler_output: SchedulerOutput, orders: MemoryOrders) -> None:
    """Sends the orders with the step; an attribute of the object is pickled with it."""
    setattr(scheduler_output, _ATTRIBUTE, orders)


def memory_orders_of(scheduler_output: SchedulerOutput) -> MemoryOrders | None:
    """Returns the orders; None if the step is not from our scheduler, or these features are off."""
    orders: MemoryOrders | None = getattr(scheduler_output, _ATTRIBUTE, None)
    return orders


def attach_link_speed(output: ModelRunnerOutput, speed: LinkSpeed) -> None:
    """Sends the worker's measurements to the scheduler, with the output of a step."""
    setattr(output, _LINK, speed)


def link_speed_of(output: ModelRunnerOutput) -> LinkSpeed | None:
    """Returns the measured speed; None if the worker sent none."""
    speed: LinkSpeed | None = getattr(output, _LINK, None)
    return speed
