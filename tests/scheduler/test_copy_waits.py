"""A request that waits a step for a block to copy does not hold up those behind it, nor does it lose its turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.schedulers import make_scheduler, request, run_step, vllm_config
from vllm_gaudi_ucm.scheduler.scheduler import UcmScheduler

ON: dict[str, Any] = {"kv_cache": {"partial_hits": True}}


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for eight tokens or more of a block."""
    monkeypatch.setattr("tests.scheduler.schedulers.BLOCK_SIZE", 16)


def scheduler_of(folder: Path, ucm: dict[str, Any], *requests: Any, num_blocks: int = 100) -> Any:
    scheduler = make_scheduler(vllm_config(folder, ucm, num_blocks=num_blocks, budget=1000), UcmScheduler)
    for one in requests:
        scheduler.add_request(one)
    return scheduler


def begun(scheduler: Any) -> set[str]:
    """Requests that begin in the next step."""
    return {new.req_id for new in run_step(scheduler).scheduled_new_reqs}


@pytest.mark.parametrize("admission", ["greedy", "exact"])
def test_others_begin_while_a_request_waits(tmp_path: Path, admission: str) -> None:
    ucm = {**ON, "scheduler": {"admission": admission}}
    asked = [request("first", 12), request("same", 12), request("other", 12, start=5), request("same too", 12)]
    scheduler = scheduler_of(tmp_path, ucm, *asked)
    assert begun(scheduler) == {"first", "other"}
    assert [one.request_id for one in scheduler.waiting] == ["same", "same too"]
    assert begun(scheduler) == {"same", "same too"}
    totals = scheduler.block_policies.totals
    assert (totals.copy_waits, totals.copies, totals.copied_tokens) == (2, 2, 22)


def test_a_waiting_request_keeps_its_seat(tmp_path: Path) -> None:
    """There are eight."""
    running = [request(f"running {number}", 12, start=number) for number in range(7)]
    behind = [request(f"behind {number}", 12, start=20 + number) for number in range(2)]
    scheduler = scheduler_of(tmp_path, ON, *running, request("same", 12), *behind)
    assert begun(scheduler) == {one.request_id for one in running}
    assert begun(scheduler) == {"same"}


def test_a_seat_is_kept_for_each(tmp_path: Path) -> None:
    running = [request(f"running {number}", 12, start=number) for number in range(5)]
    same = [request(f"same {number}", 12) for number in range(2)]
    behind = [request(f"behind {number}", 12, start=20 + number) for number in range(2)]
    scheduler = scheduler_of(tmp_path, ON, *running, *same, *behind)
    assert begun(scheduler) == {*(one.request_id for one in running), "behind 0"}
    assert begun(scheduler) == {"same 0", "same 1"}


def test_a_waiting_request_keeps_its_blocks(tmp_path: Path) -> None:
    """One block is null, two are free, and either request behind the first needs two."""
    scheduler = scheduler_of(
        tmp_path, ON, request("first", 12), request("same", 28), request("behind", 28, start=5), num_blocks=4
    )
    assert begun(scheduler) == {"first"}
    assert begun(scheduler) == {"same"}


def test_a_request_that_may_not_begin_yet_still_holds_up_those_behind_it(tmp_path: Path) -> None:
    """First come, first served: the room that the waiting request will need is no room for others."""
    ucm = {**ON, "scheduler": {"admission": "exact"}}
    asked = [request("first", 12, max_tokens=80), request("same", 12, max_tokens=80), request("behind", 12, start=5)]
    scheduler = scheduler_of(tmp_path, ucm, *asked, num_blocks=12)
    assert begun(scheduler) == {"first"}
    assert begun(scheduler) == set()
