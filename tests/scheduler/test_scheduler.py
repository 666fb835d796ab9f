"""Our scheduler classes on real requests: what they tell the method, and what they send."""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.scheduler.scheduler import scheduler_of
from tests.scheduler.schedulers import (
    BLOCK_SIZE,
    finish_step,
    make_scheduler,
    request,
    run_step,
    sampled_ids,
    vllm_config,
)
from vllm_gaudi_ucm.protocol.attachments import sparse_meta_of
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.scheduler.scheduler import UcmAsyncScheduler, UcmScheduler
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar

SELECT, REUSE, CHECK = SelectionMode
GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 20}}}
KVSTAR = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": {"sparse_steps": "always", "min_tokens": 20}}}


def selections(output: SchedulerOutput) -> dict[str, RequestSelection]:
    meta = sparse_meta_of(output)
    assert meta is not None
    return meta.requests


def modes(output: SchedulerOutput) -> dict[str, SelectionMode]:
    return {name: selection.mode for name, selection in selections(output).items()}


def test_chunks_are_dense_and_decodes_sparse(tmp_path: Path) -> None:
    """A prompt of 90 in chunks of 64; the first decode attends to 91 tokens: 22 full blocks and a tail."""
    scheduler = scheduler_of(tmp_path, GSA)
    scheduler.add_request(request("long", 90))
    scheduler.add_request(request("short", 5))
    assert [selections(run_step(scheduler)) for _ in range(2)] == [{}, {}]
    output = run_step(scheduler)
    assert output.num_scheduled_tokens == {"long": 1, "short": 1}
    assert selections(output) == {"long": RequestSelection(SELECT, 1, 20, 4)}


def test_prefetch_options_without_a_store_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """covers: C4. The defaults say nothing; KVStar's base method counts, too."""
    scheduler_of(tmp_path, GSA)
    assert "do nothing" not in caplog.text
    options = {"sparse_steps": "always", "min_tokens": 20, "prefetch_workers": 2, "prefetch_ahead": 0}
    for ucm in (
        {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}},
        {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": options}},
    ):
        caplog.clear()
        scheduler_of(tmp_path, ucm)
        assert "options prefetch_workers, prefetch_ahead do nothing without a store" in caplog.text


def test_selections_travel_with_the_output(tmp_path: Path) -> None:
    """Executors send the object by the protocol of `copy`: an attribute goes with it."""
    scheduler = scheduler_of(tmp_path, GSA)
    scheduler.add_request(request("a", 40))
    run_step(scheduler)
    output = run_step(scheduler)
    assert sparse_meta_of(copy.copy(output)) == sparse_meta_of(output)
    assert selections(output)
    assert sparse_meta_of(SchedulerOutput.make_empty()) is None


def test_without_a_method_nothing_is_added(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, {})
    scheduler.add_request(request("a", 40))
    run_step(scheduler)
    output = run_step(scheduler)
    assert scheduler.sparse is None
    assert sparse_meta_of(output) is None


def test_switch_of_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A switch that is none was refused where requests are validated; here it must not end the engine."""
    scheduler = scheduler_of(tmp_path, GSA)
    scheduler.add_request(request("on", 30, ucm_sparse=True))
    scheduler.add_request(request("off", 30, start=1, ucm_sparse=False))
    scheduler.add_request(request("wrong", 30, start=2, ucm_sparse="no"))
    run_step(scheduler)
    run_step(scheduler)
    assert set(selections(run_step(scheduler))) == {"on"}


def test_prefix_hit_up_to_the_last_token(tmp_path: Path) -> None:
    """covers: C24. A prompt of which one token is left to compute is a decode; its first selection is a new one."""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("first", 4 * 10, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(request("second", 4 * 10 + 1))
    output = run_step(scheduler)
    assert output.num_scheduled_tokens == {"second": 1}
    assert modes(output) == {"second": SELECT}
    assert modes(run_step(scheduler)) == {"second": REUSE}


def test_locks_count_the_steps_of_each_request(tmp_path: Path) -> None:
    """covers: C17"""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("a", 30))
    run_step(scheduler)
    found = [modes(run_step(scheduler))["a"] for _ in range(17)]
    assert found == [SELECT, *[REUSE] * 7, CHECK, *[REUSE] * 7, SELECT]


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_drafts(tmp_path: Path, accepted: int) -> None:
    """covers: C20. Verifications are sparse, their results reach the method, and the lock stays."""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("a", 40))
    run_step(scheduler, drafts=3)
    outputs = [run_step(scheduler, drafts=3, accepted=accepted) for _ in range(4)]
    assert [output.num_scheduled_tokens["a"] for output in outputs] == [4] * 4
    assert [modes(output)["a"] for output in outputs] == [SELECT, REUSE, REUSE, REUSE]
    metrics = scheduler.sparse.metrics
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (12, 4 * accepted)
    window = [selections(output)["a"].window_start for output in outputs]
    assert window == [41 // BLOCK_SIZE - 2] * 4


def test_preempted_requests_select_anew(tmp_path: Path) -> None:
    """covers: C5"""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("a", 40))
    run_step(scheduler)
    assert [modes(run_step(scheduler))["a"] for _ in range(2)] == [SELECT, REUSE]
    scheduler.reset_prefix_cache(reset_running_requests=True)
    output = run_step(scheduler)
    assert output.num_scheduled_tokens["a"] > 1
    assert selections(output) == {}
    assert [modes(run_step(scheduler))["a"] for _ in range(2)] == [SELECT, REUSE]


@pytest.mark.parametrize("finished", ["aborted", "at its length"])
def test_reused_ids_select_anew(tmp_path: Path, finished: str) -> None:
    """covers: C5. The second request of an id begins before the end of the first is sent."""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("a", 40, max_tokens=4 if finished == "at its length" else 50))
    run_step(scheduler)
    assert [modes(run_step(scheduler))["a"] for _ in range(3)] == [SELECT, REUSE, REUSE]
    if finished == "aborted":
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("a", 40))
    output = run_step(scheduler)
    assert output.finished_req_ids == {"a"}
    assert selections(output) == {}
    assert [modes(run_step(scheduler))["a"] for _ in range(2)] == [SELECT, REUSE]


def test_result_of_an_aborted_request(tmp_path: Path) -> None:
    """covers: D5. The request ends while its step runs."""
    scheduler = scheduler_of(tmp_path, KVSTAR)
    scheduler.add_request(request("a", 40))
    run_step(scheduler, drafts=2)
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    finish_step(scheduler, output, {"a"}, accepted=2)
    run_step(scheduler)
    assert scheduler.sparse.metrics.accepted_tokens == 0
    assert not scheduler.sparse._states
    assert not scheduler.sparse.speculative._sessions


class WorkerView:
    """What a worker has stored, from the outputs alone."""

    def __init__(self) -> None:
        self.stored: dict[str, RequestSelection] = {}

    def step(self, output: SchedulerOutput, scheduler: Any) -> None:
        begun = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for name in {*begun, *output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self.stored.pop(name, None)
        for name, found in selections(output).items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            assert output.num_scheduled_tokens[name] == 1 + drafts
            assert not name.startswith("off")
            if found.mode == SelectionMode.REUSE:
                assert self.stored[name][1:] == _sizes(found)[1:]
            elif found.mode == SelectionMode.CHECK:
                assert name in self.stored
            self.stored[name] = _sizes(found)  # type: ignore[assignment]


def _sizes(selection: RequestSelection) -> tuple[int, int, int, int]:
    return selection.mode, selection.sink_blocks, selection.window_start, selection.num_selected


@pytest.mark.parametrize("method", [GSA, KVSTAR])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(tmp_path: Path, method: dict[str, Any], async_scheduling: bool, seed: int) -> None:
    """covers: C5, C24. Few blocks (preemption), prefix hits, drafts, aborts and reused ids; nothing is left over."""
    rng = random.Random(seed)
    scheduler = scheduler_of(tmp_path, method, num_blocks=40, async_scheduling=async_scheduling)
    worker, num_sparse, num_preempted = WorkerView(), 0, 0
    in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
    for step in range(150):
        name = f"{rng.choice(['off', 'on'])}-{rng.randrange(8)}"
        if step < 120 and name not in scheduler.requests and rng.random() < 0.4:
            switch = {"ucm_sparse": False} if name.startswith("off") else {}
            new = request(name, rng.choice([1, 3, 25, 41, 80]), max_tokens=rng.randint(1, 40), **switch)
            scheduler.add_request(new)
        if scheduler.requests and rng.random() < 0.05:
            scheduler.finish_requests(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        worker.step(output, scheduler)
        num_sparse += len(selections(output))
        num_preempted += len(output.preempted_req_ids or ())
        in_flight.append((output, sampled_ids(scheduler, output)))
        if len(in_flight) > async_scheduling:
            drafts = 0 if async_scheduling else rng.choice([0, 0, 2])
            finish_step(scheduler, *in_flight.popleft(), drafts=drafts, accepted=rng.randrange(3))
    assert num_sparse > 50
    assert num_preempted > 0
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    run_step(scheduler)
    held = scheduler.sparse.selecting_method._held
    assert not held
    if isinstance(scheduler.sparse, KVStar):
        assert not scheduler.sparse._states


def test_bases() -> None:
    assert issubclass(UcmScheduler, Scheduler)
    assert not issubclass(UcmScheduler, AsyncScheduler)
    assert issubclass(UcmAsyncScheduler, AsyncScheduler)


@pytest.mark.parametrize("ucm", [{}, GSA], ids=["dense", "sparse"])
def test_what_a_preempted_request_was_to_compute_is_not_found(tmp_path: Path, ucm: dict[str, Any]) -> None:
    """covers: F5 A7. By priority vLLM preempts a request that the same step has scheduled already: nobody computes the
    blocks that it was to fill."""
    config = vllm_config(tmp_path, ucm, num_blocks=28, budget=20)
    config.scheduler_config.policy = "priority"
    config.scheduler_config.long_prefill_token_threshold = 16
    scheduler = make_scheduler(config, UcmScheduler)
    less, more = request("less", 100, max_tokens=2), request("more", 6, start=7, max_tokens=8)
    less.priority, more.priority = 1, 0
    scheduler.add_request(less)
    run_step(scheduler)
    scheduler.add_request(more)
    written = set(scheduler.kv_cache_manager.get_block_ids("less")[0])
    for _ in range(60):
        output = scheduler.schedule()
        for name, count in output.num_scheduled_tokens.items():
            end = scheduler.requests[name].num_computed_tokens
            table = scheduler.kv_cache_manager.get_block_ids(name)[0][: -(-end // BLOCK_SIZE)]
            first = (end - count) // BLOCK_SIZE
            assert written.issuperset(table[:first]), f"{name} reads blocks that nobody has computed"
            written.update(table[first:])
        pool = scheduler.kv_cache_manager.block_pool
        written -= {block.block_id for block in pool.blocks if block.ref_cnt <= 0 and block.block_hash is None}
        finish_step(scheduler, output, sampled_ids(scheduler, output))
    assert less.num_preemptions
    assert not scheduler.requests
