"""The conservation laws of the prefetch engine: what came in is pending or has an outcome, and memory is somewhere."""

from __future__ import annotations

from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
from vllm_gaudi_ucm.prefetch.task import WAITING


def broken_law(dispatcher: Dispatcher) -> str | None:
    """The first law that does not hold, in words; None if all do. To be called with the lock held."""
    cache, ledger, loads = dispatcher.cache, dispatcher.ledger, dispatcher.loads.values()
    pending = ledger.pending()
    settled = sum(ledger.outcomes.values())
    if dispatcher.counters.submitted != settled + len(pending) + ledger.replaced:
        return f"{dispatcher.counters.submitted} submitted, {settled} settled, {len(pending)} pending"
    if cache.allocated > cache.capacity:
        return f"{cache.allocated} slots allocated of {cache.capacity}"
    filling = sum(load.slot is not None and load.slot.key is None for load in loads)
    if cache.unkeyed != filling:
        return f"{cache.unkeyed} slots are neither free nor found, {filling} are being filled"
    pins = sum(len(task.pins) for task in pending)
    held = sum(len(task.held) for task in ledger.complete())
    delivered = sum(load.slot is not None and load.slot.key is not None for load in loads)
    if cache.keyed_users() != pins + held + delivered:
        return f"{cache.keyed_users()} uses of slots, {pins} pinned, {held} held, {delivered} being delivered"
    delivering = sum(load.delivering is not None for load in loads)
    if delivering != ledger.delivering.total():
        return f"{delivering} blocks being delivered, {ledger.delivering.total()} counted by request"
    for task in dispatcher.queue.tasks():
        if not task.is_open or not task.queued:
            return f"request {task.request_id} is queued without blocks to load"
    for task in pending:
        if task.is_open and task.remaining != task.states.count(WAITING):
            return f"request {task.request_id}: {task.remaining} blocks remain, {task.states.count(WAITING)} wait"
        if not task.is_open and not task.delivering:
            return f"request {task.request_id} is settled, delivers nothing and has no outcome"
    return None
