"""A reset of the prefix cache preempts requests, and the next step admits them again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.memory_mode.fake_worker import FakeWorker
from tests.memory_mode.scheduler_side import run_step, scheduler_of
from tests.scheduler.schedulers import request


def test_what_the_next_step_allots_is_kept(tmp_path: Path) -> None:
    """covers: A3. vLLM names a request that a reset has preempted with the output of the step that admits it again, in
    which a connector may have left blocks in its store."""
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    for _ in range(6):
        run_step(scheduler, worker)
    assert scheduler.offload.num_offloaded
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.offload.num_offloaded
    allocate = scheduler.kv_cache_manager.allocate_slots

    def leaving(*args: Any, **kwargs: Any) -> Any:
        blocks = allocate(*args, **kwargs)
        scheduler.offload.leave_stored("a", {3: b"key"})
        return blocks

    scheduler.kv_cache_manager.allocate_slots = leaving
    output = scheduler.schedule()
    assert "a" in output.num_scheduled_tokens
    scheduler.offload.check_integrity()
    assert scheduler.offload.num_offloaded == 1
    assert scheduler.offload.is_guess("a")
