"""Leaks: blocks, slots and rows that an engine still holds after all requests have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm import SamplingParams

from tests.engine.serving import Engine
from tests.engine.worker_processes import EngineOfWorkers, live_requests

SECONDS = 20.0
"""Time for blocks that are on their way to a store."""


def leaks(engine: Engine) -> Iterator[str]:
    """Blocks, slots and rows that an idle engine still holds, a line each."""
    _settle(engine)
    scheduler = engine.core.scheduler
    yield from held_blocks(scheduler.kv_cache_manager.block_pool)
    yield from waiting_requests(scheduler)
    workers = engine.on_workers(live_requests) if isinstance(engine, EngineOfWorkers) else [_live(engine)]
    for rank, rows in enumerate(workers):
        left = sorted(set(rows) - scheduler.finished_req_ids)
        if left:
            yield f"worker {rank} has rows of {', '.join(left)}"
    policies = getattr(scheduler, "block_policies", None)
    swap = None if policies is None else policies.named("swap")
    if swap is not None:
        slots = swap._slots
        if slots.num_free != slots.count:
            yield f"{slots.count - slots.num_free} of {slots.count} slots in host memory are not free"
        yield from _broken("host memory", swap.check_integrity)
    if not isinstance(engine, EngineOfWorkers) and engine.runner.transfer is not None:
        yield from _transfers(engine.runner.transfer.connector)


def held_blocks(pool: Any) -> Iterator[str]:
    """pool: vLLM's `BlockPool`, of which one block is never given."""
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if held:
        yield f"{held} of {pool.num_gpu_blocks} blocks are not free"
    check = getattr(pool.free_block_queue, "check_integrity", None)
    if check is not None:
        yield from _broken("free blocks", check)


def waiting_requests(scheduler: Any) -> Iterator[str]:
    """Requests that the scheduler still has."""
    if scheduler.requests:
        yield f"the scheduler has requests {', '.join(sorted(scheduler.requests))}"
    if scheduler.running or len(scheduler.waiting):
        yield f"the scheduler has {len(scheduler.running)} running and {len(scheduler.waiting)} waiting"


def _live(engine: Engine) -> list[str]:
    table = engine.runner.parts.requests
    table.check_integrity()
    return list(table.requests)


def _transfers(connector: Any) -> Iterator[str]:
    worker = getattr(connector, "worker_side", None)
    if worker is not None:
        if len(worker.loads):
            yield f"{len(worker.loads)} requests wait for a store"
        yield from _broken("blocks on their way to a store", worker.saver.check_integrity)
        yield from _broken("blocks on their way from a store", worker.engine.check_integrity)


def _broken(what: str, check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except AssertionError as error:
        yield f"{what}: {error}"


def _settle(engine: Engine) -> None:
    """Steps until blocks have reached their store. The next step tells workers which requests have ended."""
    engine.add(engine.new_id(), [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    end = time.monotonic() + SECONDS
    steps = 0
    while time.monotonic() < end:
        engine.step()
        steps += 1
        scheduler = engine.core.scheduler
        if steps > 4 and not scheduler.has_unfinished_requests() and not list(held_blocks_of(scheduler)):
            return
        if steps > 10:
            time.sleep(0.01)


def held_blocks_of(scheduler: Any) -> Iterator[str]:
    """Blocks and requests that a scheduler holds."""
    yield from held_blocks(scheduler.kv_cache_manager.block_pool)
    yield from waiting_requests(scheduler)
