"""Under a method dense and sparse requests have blocks of their own: no dense one finds what a sparse step wrote."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.schedulers import make_scheduler, request, run_step, vllm_config
from vllm_gaudi_ucm.protocol.attachments import sparse_ids_of, sparse_meta_of
from vllm_gaudi_ucm.scheduler.parts import SparseStepsAhead
from vllm_gaudi_ucm.scheduler.scheduler import UcmAsyncScheduler, UcmScheduler

GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"min_tokens": 20}}}
ALWAYS = {**GSA, "ucm_sparse_config": {"GSA": {"min_tokens": 20, "min_blocks": 1, "sparse_steps": "always"}}}
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


INPUTS = list(product((True, False), repeat=3))


@CLASSES
@pytest.mark.parametrize("waits", [True, False], ids=["once the one before has ended", "at once"])
@pytest.mark.parametrize("switches", INPUTS, ids=str)
def test_a_session_is_dense_as_long_as_all_its_inputs_are(
    tmp_path: Path, scheduler_class: Any, switches: tuple[bool, ...], waits: bool
) -> None:
    """covers: D2 F2. Each input has parameters of its own; what a later one computes stands on what is there."""
    scheduler = scheduler_of(tmp_path, GSA, scheduler_class)
    # goes on counting, so that the whole is a prompt that counts
    inputs = [
        request("session", 20, start=20 * number, max_tokens=1, resumable=True, ucm_sparse=switch)
        for number, switch in enumerate(switches)
    ]
    scheduler.add_request(inputs[0])
    for number, one in enumerate(inputs[1:], 1):
        if waits:
            run_step(scheduler)
            scheduler.add_request(one)
        else:
            scheduler.add_request(one)
            run_step(scheduler)
        session, so_far = scheduler.requests["session"], 20 * (number + 1)
        twins = {switch: request(f"twin {number} {switch}", so_far, ucm_sparse=switch) for switch in (True, False)}
        for twin in twins.values():
            scheduler.add_request(twin)
        kind = any(switches[: number + 1])
        assert session.all_token_ids[:] == twins[kind].all_token_ids[:]
        assert session.block_hashes == twins[kind].block_hashes != twins[not kind].block_hashes
        assert len(session.block_hashes) == so_far // 4
        scheduler.finish_requests([twin.request_id for twin in twins.values()], RequestStatus.FINISHED_ABORTED)
    run_step(scheduler)
    # what is in the cache was written by requests of the kind under which it is found
    for switch in (True, False):
        twin = request(f"last {switch}", 61, ucm_sparse=switch)
        scheduler.add_request(twin)
        dense = next((number for number, one in enumerate(switches) if one), len(switches))
        assert cached_tokens(scheduler, twin.request_id) == (60 if switch and not dense else 20 * dense * (not switch))


@CLASSES
@pytest.mark.parametrize("switches", INPUTS, ids=str)
def test_each_input_decides_for_its_own_tokens(
    tmp_path: Path, scheduler_class: Any, switches: tuple[bool, ...]
) -> None:
    """covers: D2"""
    scheduler = scheduler_of(tmp_path, ALWAYS, scheduler_class)
    for number, switch in enumerate(switches):
        one = request("session", 30, start=30 * number, max_tokens=5, resumable=True, ucm_sparse=switch)
        scheduler.add_request(one)
        found = []
        while scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            meta = sparse_meta_of(run_step(scheduler))
            assert meta is not None
            found.append("session" in meta.requests)
        # the prompt is computed whole
        assert found == [False] + [switch] * 4


def test_workers_get_the_decision_with_each_input(tmp_path: Path) -> None:
    """covers: D2 F2. They decide over steps, whose drafts they verify before the scheduler knows."""
    scheduler = scheduler_of(tmp_path, GSA, UcmAsyncScheduler)
    method = scheduler.sparse
    scheduler.parts = (SparseStepsAhead(scheduler, method),)
    for name, switch in (("sparse", True), ("dense", 0), ("wrong", "no")):
        scheduler.add_request(request(name, 3, ucm_sparse=switch))
    scheduler.add_request(request("session", 3, max_tokens=1, resumable=True, ucm_sparse=False))
    assert sparse_ids_of(run_step(scheduler)) == {"sparse"}
    for switch in (True, True, False):
        scheduler.add_request(request("session", 3, max_tokens=1, resumable=True, ucm_sparse=switch))
        assert sparse_ids_of(run_step(scheduler)) == ({"session"} if switch else set())
