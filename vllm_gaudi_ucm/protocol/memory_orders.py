"""What the scheduler has every worker do with blocks of the KV cache before a step: plain data.

Copies of blocks for one request travel in vLLM's own field, `SchedulerOutput.kv_cache_block_copies`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput

_ATTRIBUTE = "ucm_memory_orders"


class MemoryTotals(msgspec.Struct):
    """Since the start.

    copies, copied_tokens: blocks copied for a request that goes on writing them, and their tokens, which are not
        computed again. copy_waits: steps that a request has waited for a block to copy.
    admission_waits: answers of `ucm.scheduler.admission` that a request may not begin yet.
    """

    copies: int = 0
    copied_tokens: int = 0
    copy_waits: int = 0
    admission_waits: int = 0


class MemoryOrders(msgspec.Struct):
    """Of a step. totals: for the worker's metrics."""

    totals: MemoryTotals = msgspec.field(default_factory=MemoryTotals)


def attach_memory_orders(scheduler_output: SchedulerOutput, orders: MemoryOrders) -> None:
    """Sends them with the step; an attribute of the object goes wherever the object is pickled to."""
    setattr(scheduler_output, _ATTRIBUTE, orders)


def memory_orders_of(scheduler_output: SchedulerOutput) -> MemoryOrders | None:
    """None where another scheduler than ours made the step, or nothing of this is on."""
    orders: MemoryOrders | None = getattr(scheduler_output, _ATTRIBUTE, None)
    return orders
