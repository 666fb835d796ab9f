"""Helpers of `test_scheduler_side.py` that other tests use, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.memory_mode.fake_worker import FakeWorker
from tests.scheduler.schedulers import finish_step, make_scheduler, sampled_ids, vllm_config
from vllm_gaudi_ucm.protocol.attachments import attach_report
from vllm_gaudi_ucm.scheduler.scheduler import UcmScheduler

WINDOWS = {"sparse_steps": "always", "min_tokens": 20, "sparse_ratio": 0.2, "min_blocks": 4}


def scheduler_of(
    folder: Path,
    num_blocks: int = 200,
    method: str = "GSA",
    caching: bool = True,
    prefetch: dict[str, Any] | None = None,
    graphs: str = "auto",
    windows: Sequence[int] = (),
    **mode: Any,
) -> Any:
    ucm = {
        "ucm_sparse_method": method,
        "graphs": {"mode": graphs},
        "ucm_sparse_config": {method: {**WINDOWS, **(prefetch or {})}},
        "memory_mode": {
            "enabled": True,
            "on_device_ratio": 0.4,
            "refresh_steps": 3,
            "history_decay": 0.0,
            "max_missed": 1.0,
            **mode,
        },
    }
    config = vllm_config(folder, ucm, num_blocks=num_blocks)
    config.cache_config.enable_prefix_caching = caching
    return make_scheduler(config, UcmScheduler, windows)


def run_step(scheduler: Any, worker: FakeWorker) -> Any:
    """A step, with the laws checked in the middle and at its end."""
    output = scheduler.schedule()
    scheduler.offload.check_integrity()
    report = worker.step(output, scheduler.requests)
    finish_with(scheduler, output, report)
    scheduler.offload.check_integrity()
    pool = scheduler.kv_cache_manager.block_pool
    worker.poison(block.block_id for block in pool.blocks if block.ref_cnt <= 0 and block.block_hash is None)
    return output


def finish_with(scheduler: Any, output: Any, report: Any) -> None:
    original = scheduler.update_from_output

    def update(scheduled: Any, result: Any) -> Any:
        attach_report(result, report)
        return original(scheduled, result)

    scheduler.update_from_output = update
    try:
        finish_step(scheduler, output, sampled_ids(scheduler, output))
    finally:
        del scheduler.update_from_output
