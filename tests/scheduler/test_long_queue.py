"""A step's scheduling is as much work with a thousand requests waiting as with a hundred."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.scheduler.schedulers import finish_step, make_scheduler, request, run_step, sampled_ids, vllm_config
from vllm_gaudi_ucm.scheduler.scheduler import UcmScheduler

OPTIONS: dict[str, dict[str, Any]] = {
    "swap": {"preemption": {"mode": "swap", "host_memory": 1 << 20}},
    "exact": {"scheduler": {"admission": "exact"}},
    "partial hits": {"kv_cache": {"partial_hits": True}},
    "compaction": {"kv_cache": {"compaction": True}},
    "exact, partial hits": {"scheduler": {"admission": "exact"}, "kv_cache": {"partial_hits": True}},
    "sparse": {"ucm_sparse_method": "GSA"},
}
STEPS = 12


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With partial hits a request waits for eight tokens or more of a block."""
    monkeypatch.setattr("tests.scheduler.schedulers.BLOCK_SIZE", 16)


def calls_of_steps(folder: Path, ucm: dict[str, Any], waiting: int, *, alike: bool) -> int:
    """Calls of functions while steps are scheduled. alike: every prompt is the same."""
    scheduler = make_scheduler(vllm_config(folder, ucm, num_blocks=100), UcmScheduler)
    for number in range(waiting):
        start = 0 if alike else number
        scheduler.add_request(request(f"request {number}", 38, max_tokens=60, start=start))
    run_step(scheduler)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(STEPS):
        sys.setprofile(count)
        try:
            output = scheduler.schedule()
        finally:
            sys.setprofile(None)
        finish_step(scheduler, output, sampled_ids(scheduler, output))
    assert scheduler.running
    return calls


@pytest.mark.parametrize("alike", [False, True], ids=["different prompts", "equal prompts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_work_of_a_step_does_not_grow_with_the_queue(tmp_path: Path, name: str, alike: bool) -> None:
    few, many = (calls_of_steps(tmp_path, OPTIONS[name], waiting, alike=alike) for waiting in (100, 1000))
    assert many == pytest.approx(few, abs=100)
