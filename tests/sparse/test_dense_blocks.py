"""Under a method dense and sparse requests have blocks of their own: no dense one finds what a sparse step wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.schedulers import make_scheduler, request, run_step, vllm_config
from vllm_gaudi_ucm.scheduler.scheduler import UcmAsyncScheduler, UcmScheduler

GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"min_tokens": 20}}}
CLASSES = pytest.mark.parametrize("scheduler_class", [UcmScheduler, UcmAsyncScheduler])


def scheduler_of(folder: Path, ucm: dict[str, Any], scheduler_class: Any = UcmScheduler) -> Any:
    is_async = scheduler_class is UcmAsyncScheduler
    return make_scheduler(vllm_config(folder, ucm, async_scheduling=is_async), scheduler_class)


def cached_tokens(scheduler: Any, request_id: str) -> int:
    """Tokens of a request that the device's prefix cache holds."""
    return int(scheduler.kv_cache_manager.get_computed_blocks(scheduler.requests[request_id])[1])


@CLASSES
def test_each_kind_finds_its_own(tmp_path: Path, scheduler_class: Any) -> None:
    """covers: D2 F2"""
    scheduler = scheduler_of(tmp_path, GSA, scheduler_class)
    for name, switch in (("sparse", True), ("dense", False)):
        scheduler.add_request(request(name, 40, max_tokens=1, ucm_sparse=switch))
        assert cached_tokens(scheduler, name) == 0
        run_step(scheduler)
    # one with a switch that is none is dense, too
    for name, extra in (("sparse again", {}), ("dense again", {"ucm_sparse": False}), ("wrong", {"ucm_sparse": "no"})):
        scheduler.add_request(request(name, 41, **extra))
        assert cached_tokens(scheduler, name) == 40


def test_blocks_of_an_answer_are_of_its_kind(tmp_path: Path) -> None:
    """covers: F2. Hashes are made as tokens come."""
    scheduler = scheduler_of(tmp_path, GSA)
    grown, whole = request("grown", 6, ucm_sparse=False), request("whole", 40, ucm_sparse=False)
    for one in (grown, whole):
        scheduler.add_request(one)
    for token in whole.all_token_ids[6:]:
        grown.append_output_token_ids(token)
    assert grown.block_hashes == whole.block_hashes
    assert len(whole.block_hashes) == 10
    assert not set(whole.block_hashes) & set(request("sparse", 40).block_hashes)


def test_without_a_method_all_requests_share_blocks(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, {})
    one = request("one", 40, ucm_sparse=False)
    scheduler.add_request(one)
    assert one.block_hashes == request("other", 40).block_hashes


@pytest.mark.parametrize("salt", [None, "mine"])
def test_the_salt_stays_the_users(tmp_path: Path, salt: str | None) -> None:
    """covers: D5. Events and connectors see the user's, and none makes a sparse request look dense."""
    scheduler = scheduler_of(tmp_path, GSA)
    one = request("one", 40, cache_salt=salt, ucm_sparse=False)
    scheduler.add_request(one)
    assert one.cache_salt == salt
    for guess in (None, salt, "ucm dense", f"ucm dense{salt}", str(("ucm dense", salt)), repr(["ucm dense", salt])):
        sparse = request("sparse", 40, cache_salt=guess)
        scheduler.add_request(sparse)
        assert not set(sparse.block_hashes) & set(one.block_hashes)
        scheduler.finish_requests("sparse", RequestStatus.FINISHED_ABORTED)
    other = request("other", 40, cache_salt="of somebody else", ucm_sparse=False)
    scheduler.add_request(other)
    assert not set(other.block_hashes) & set(one.block_hashes)


@CLASSES
def test_a_preempted_request_finds_its_own_blocks(tmp_path: Path, scheduler_class: Any) -> None:
    """covers: C5 F2"""
    scheduler = scheduler_of(tmp_path, GSA, scheduler_class)
    for name, switch in (("sparse", True), ("dense", False)):
        scheduler.add_request(request(name, 40, ucm_sparse=switch))
        run_step(scheduler)
    manager = scheduler.kv_cache_manager
    (own,), (others,) = manager.get_block_ids("dense"), manager.get_block_ids("sparse")
    scheduler.running.remove(scheduler.requests["dense"])
    scheduler._preempt_request(scheduler.requests["dense"], 0.0)
    (found,) = manager.get_computed_blocks(scheduler.requests["dense"])[0].get_block_ids()
    assert found == own[:10]
    assert not set(found) & set(others)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_input_of_a_session_decides(tmp_path: Path, first: bool) -> None:
    """covers: F2. Each input has parameters of its own; what a later one computes stands on what is there."""
    scheduler = scheduler_of(tmp_path, GSA)
    scheduler.add_request(request("session", 3, max_tokens=1, resumable=True, ucm_sparse=first))
    run_step(scheduler)
    # goes on counting, so that the whole is a prompt that counts
    scheduler.add_request(request("session", 40, start=3, max_tokens=1, resumable=True, ucm_sparse=not first))
    twins = {switch: request(f"twin {switch}", 43, ucm_sparse=switch) for switch in (True, False)}
    for twin in twins.values():
        scheduler.add_request(twin)
    session = scheduler.requests["session"]
    assert session.all_token_ids[:] == twins[first].all_token_ids[:]
    assert session.block_hashes == twins[first].block_hashes != twins[not first].block_hashes
    assert len(session.block_hashes) == 10
