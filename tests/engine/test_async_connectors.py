"""Asynchronous scheduling beside KV connectors: a step is planned before it is known what the one before has loaded,
and before the scheduler knows what was stored; no token changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.connector.fault_store import FaultStore
from tests.engine.any_connector import offloading
from tests.engine.async_drafts import ASKED, DRAFTED, drafted_by
from tests.engine.async_ranks import CHECKED, ApartEngine, check, watch
from tests.engine.async_traffic import (
    GROWING,
    MIX,
    STATIC,
    Arrival,
    Found,
    Watched,
    any_traffic,
    assert_equal,
    check_stop_strings,
    params,
    serve,
    start,
)
from tests.engine.broken_connector import BrokenConnector
from tests.engine.connector_faults import transfer
from tests.engine.multi_connector import multi, ours, shared
from tests.engine.pair_connector import PairConnector

pytestmark = pytest.mark.slow  # starts engines

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 18, "max_model_len": 256}
GSA: dict[str, Any] = {
    "ucm_sparse_method": "GSA",
    # of all blocks, because a request that was preempted, or that loads, is computed densely again
    "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 32, "sparse_ratio": 1.0}},
}


@pytest.fixture(scope="module")
def synchronous(tiny_text_model: Path) -> Iterator[Watched]:
    """Without a connector."""
    with start(tiny_text_model, {}, is_async=False) as engine:
        yield Watched(engine)


@pytest.fixture(scope="module")
def expected(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(MIX)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultStore:
    found = FaultStore()
    monkeypatch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: found)
    return found


def worker_side(watched: Watched) -> Any:
    assert watched.engine.runner.transfer is not None
    connector: Any = watched.engine.runner.transfer.connector
    return connector.worker_side


@pytest.mark.parametrize("kind", ["true shapes", "static", "sparse drafts", "sparse"])
def test_our_store(tiny_text_model: Path, expected: list[list[Found]], store: FaultStore, kind: str) -> None:
    """Every kind of request, with aborts and stops: blocks are stored, come back, come back slowly, or only in part.
    covers: A1 A3 A8 C8"""
    ucm = {"true shapes": {}, "static": STATIC, "sparse drafts": GSA, "sparse": GSA}[kind]
    options: dict[str, Any] = {"kv_transfer_config": transfer(), "enable_prefix_caching": False}
    asked, wanted = MIX, expected
    if kind == "sparse drafts":
        options["speculative_config"] = drafted_by(tiny_text_model)
        asked, wanted = ASKED, [expected[index] for index in DRAFTED]
    with start(tiny_text_model, ucm, is_async=True, **options) as engine:
        assert engine.core.batch_queue_size == 2
        watched = Watched(engine)
        side = worker_side(watched)
        assert_equal(watched.serve(asked), wanted)
        assert side.saver.flush(60.0)
        stored = len(store.blocks)
        assert stored > 20
        if kind == "true shapes":
            assert_equal(watched.serve(asked), wanted)
            assert side.loads.counts.loaded_blocks > 20
            assert side.loads.counts.failed_blocks == 0
        store.load_seconds = 0.003
        store.lost = set(list(store.blocks)[1::3])
        assert_equal(watched.serve(asked), wanted)
        assert side.loads.counts.loaded_blocks > 10
        assert side.loads.counts.failed_blocks > 3
        store.heal()
        check_stop_strings(engine, expected)
        assert watched.queued > 0.6 * watched.schedules
        assert kind == "sparse drafts" or watched.ahead >= 20
        assert side.saver.flush(60.0)
        side.saver.check_integrity()
    # what a step stores that was planned ahead is what the key says
    options = {"kv_transfer_config": transfer(), "enable_prefix_caching": False}
    if kind == "true shapes":
        with start(tiny_text_model, ucm, is_async=False, **options) as engine:
            watched = Watched(engine)
            assert_equal(watched.serve(asked), wanted)
            assert worker_side(watched).loads.counts.loaded_blocks > 20


@pytest.mark.usefixtures("contract")
def test_preempted_requests(tiny_text_model: Path, synchronous: Watched, store: FaultStore) -> None:
    """In a cache that is too small, also while loads are slow. covers: A7 C9"""
    traffic = any_traffic(11, 14)
    wanted = synchronous.serve(GROWING), synchronous.serve(traffic)
    with start(tiny_text_model, {}, is_async=True, kv_transfer_config=transfer(), **SMALL) as engine:
        watched = Watched(engine)
        for store.load_seconds in (0.0, 0.005):
            assert_equal(watched.serve(GROWING), wanted[0])
            assert_equal(watched.serve(traffic), wanted[1])
        assert engine.preemptions > 2
        assert watched.ahead > 20
        assert worker_side(watched).loads.counts.loaded_blocks > 0


PROMPTS = [arrival.prompt for arrival in MIX if len(arrival.prompt) > 34][:4]
TOGETHER = [
    # the second finds blocks of the first in the prefix cache, one step after these were to be loaded
    *(Arrival(step, PROMPTS[0], params(max_tokens=12)) for step in (0, 1, 2)),
    Arrival(4, PROMPTS[1], params(max_tokens=20, logprobs=2)),
    Arrival(5, PROMPTS[1][:40], params(max_tokens=9)),
    Arrival(6, PROMPTS[2], params(temperature=1.0, seed=5, repetition_penalty=1.2)),
    Arrival(7, PROMPTS[3], params(max_tokens=30), 3),
    Arrival(8, PROMPTS[3], params(temperature=1.0, seed=6, stop_token_ids=list(range(0, 4000, 2)))),
]


# a step has room for a whole prompt, of which the connector stores what its first step has computed
ROOMY: dict[str, Any] = {"max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def stored(tiny_text_model: Path, synchronous: Watched, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the blocks of requests, as a connector of vLLM's stores them."""
    wanted, folder = synchronous.serve(TOGETHER), tmp_path_factory.mktemp("stored")
    with start(tiny_text_model, {}, False, kv_transfer_config=multi(shared(folder)), **ROOMY) as engine:
        assert_equal(serve(engine, TOGETHER), wanted)
    return folder


@pytest.mark.parametrize("kind", ["true shapes", "static", "drafts", "beside ours"])
def test_loads_that_fail_within_a_step(
    tiny_text_model: Path, synchronous: Watched, stored: Path, tmp_path: Path, kind: str
) -> None:
    """The next step is planned when it is known: it has read what was not loaded, and nothing that it gives counts.
    covers: C8 D3"""
    wanted = synchronous.serve(TOGETHER)
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    ucm = STATIC if kind == "static" else {}
    options = {**ROOMY, "speculative_config": drafted_by(tiny_text_model) if kind == "drafts" else None}
    children = [shared(tmp_path, BrokenConnector), *([ours(tmp_path)] if kind == "beside ours" else [])]
    broken = BrokenConnector
    broken.failures = 0
    config = multi(*children)
    config.kv_load_failure_policy = "recompute"
    with start(tiny_text_model, ucm, True, kv_transfer_config=config, **options) as engine:
        watched = Watched(engine)
        assert_equal(watched.serve(TOGETHER), wanted)
        assert broken.failures >= 2
        assert watched.queued > 10
    if kind == "beside ours":
        # nothing that the steps have stored is wrong
        with start(tiny_text_model, {}, False, kv_transfer_config=multi(ours(tmp_path))) as engine:
            assert_equal(serve(engine, TOGETHER), wanted)


SHAPES = pytest.mark.parametrize("ucm", [{}, STATIC], ids=["true shapes", "static"])


@SHAPES
def test_a_connector_that_works_layer_by_layer(
    tiny_text_model: Path, synchronous: Watched, tmp_path: Path, ucm: dict[str, Any]
) -> None:
    """It loads within a step, and saves each layer after its attention."""
    wanted, config = synchronous.serve(TOGETHER), multi(shared(tmp_path, PairConnector))
    # It stores a prompt with the first step that computes some of it, under the key of all of it, and looks up tokens
    # that a preempted request has generated, which it never stores. So with chunked prompts or a tight cache the
    # synchronous engine gives other tokens, or ends, too.
    options: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
    with start(tiny_text_model, ucm, True, kv_transfer_config=config, **options) as engine:
        watched = Watched(engine)
        for _ in range(2):
            assert_equal(watched.serve(TOGETHER), wanted)
        assert watched.ahead > 20


@SHAPES
def test_offloading(tiny_text_model: Path, synchronous: Watched, ucm: dict[str, Any]) -> None:
    """vLLM's connector, which loads and saves beside the steps, in a cache that is too small."""
    config, traffic = offloading(block_size=16), GROWING if ucm else [*MIX, *GROWING]
    wanted, grown = synchronous.serve(traffic), synchronous.serve(GROWING)
    with start(tiny_text_model, ucm, True, kv_transfer_config=config, **SMALL) as engine:
        watched = Watched(engine)
        assert_equal(watched.serve(traffic), wanted)
        assert_equal(watched.serve(GROWING), grown)
        assert engine.preemptions > 2
        assert watched.ahead > 20


def test_two_workers_with_a_store(tiny_text_model: Path, expected: list[list[Found]], tmp_path: Path) -> None:
    """Each tells the engine what it has loaded, and is asked for its outputs."""
    config = KVTransferConfig(**ours(tmp_path))
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
    with start(tiny_text_model, CHECKED, True, ApartEngine, kv_transfer_config=config, **options) as engine:
        engine.llm.collective_rpc(watch)
        for _ in range(2):
            assert_equal(serve(engine, MIX[:9]), expected[:9])
        (steps, ahead), (others, also) = (seen for seen, *_ in engine.llm.collective_rpc(check))
        assert steps == others
        assert min(ahead, also) > 0
        assert min(engine.llm.collective_rpc(loaded_blocks)) > 10


def loaded_blocks(worker: Any) -> int:
    """In a worker."""
    return int(worker.model_runner.transfer.connector.worker_side.loads.counts.loaded_blocks)


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}], ids=str)
def test_drafts_in_worker_processes(
    tiny_text_model: Path, expected: list[list[Found]], synchronous: Watched, options: dict[str, Any]
) -> None:
    """The engine schedules a step while the workers verify the one before, and make its drafts. covers: A6 A7 A8"""
    drafts = {"speculative_config": drafted_by(tiny_text_model), **options}
    if "tensor_parallel_size" in options:
        grown = synchronous.serve(GROWING)
        # each worker decides what is sparse
        with start(tiny_text_model, {**CHECKED, **GSA}, True, ApartEngine, **drafts, **SMALL) as engine:
            engine.llm.collective_rpc(watch)
            assert_equal(serve(engine, GROWING), grown)
            assert engine.preemptions > 2
        return
    with start(tiny_text_model, CHECKED, True, ApartEngine, **drafts) as engine:
        assert engine.core.batch_queue_size == 2
        engine.llm.collective_rpc(watch)
        assert_equal(serve(engine, ASKED), [expected[index] for index in DRAFTED])
        check_stop_strings(engine, expected)
