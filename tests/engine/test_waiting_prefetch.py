"""Requests that wait for a place in the batch find their blocks in host memory when they get it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.connector.fault_store import FaultStore
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB
from tests.observability.exposition import scrape
from tests.prefetch.stores import eventually
from vllm_gaudi_ucm.observability.metrics_file import metrics_folder
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
RNG = random.Random(5)
FIRST, *OTHERS = [[RNG.randrange(3, VOCAB) for _ in range(length)] for length in (40, 97, 64, 81, 70)]
PROMPTS = [FIRST, *OTHERS]
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 96}
AHEAD = 3
OUTPUTS = 24
GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"prefetch_ahead": AHEAD, "prefetch_cache_size": 9}}}


class Served:
    """One request at a time, with the connector over a fault store; GSA's section holds the prefetch options."""

    def __init__(self, engine: Engine, store: FaultStore) -> None:
        self.engine = engine
        self.store = store
        self.phase_log = engine.runner.parts.records.phase_log.path
        connector: Any = engine.runner.transfer and engine.runner.transfer.connector
        self.worker = connector.worker_side
        self.scheduler = engine.core.scheduler.connector.scheduler_side

    def add(self, prompt: list[int], outputs: int = OUTPUTS) -> str:
        name = self.engine.new_id()
        self.engine.add(name, prompt, greedy_params(outputs))
        return name

    def run_first(self) -> None:
        """The first request has loaded what is stored of it and runs, so that no other gets a place before it ends."""
        self.add(PROMPTS[0])
        while not self.engine.core.scheduler.running:
            self.engine.step()

    def settle(self) -> None:
        """Nothing is left of any request, waiting ones included."""
        for _ in range(3):
            self.engine.step()
        assert self.worker.saver.flush(60.0)
        self.worker.engine.check_integrity()
        assert self.scheduler._waiting.num_requests == 0
        assert self.scheduler.num_requests == len(self.worker.loads) == 0
        self.engine.check_idle()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, OUTPUTS)


@pytest.fixture(scope="module")
def served(tiny_llama: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store, folder = FaultStore(), tmp_path_factory.mktemp("log")
    transfer = KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": {"kind": "memory"}, "prefetch": {"prefetch_workers": 2}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
        ucm = {**GSA, "phase_log": str(folder / "phases.jsonl")}
        with Engine(tiny_llama, ucm, kv_transfer_config=transfer, enable_prefix_caching=False, **OPTIONS) as engine:
            served = Served(engine, store)
            assert_same(engine.greedy(PROMPTS, OUTPUTS), expected)
            served.settle()
            yield served
            store.heal()


def test_options_of_gsa_reach_the_engine(served: Served) -> None:
    """covers: C4. What the connector's own section says stands over them."""
    options = served.worker.engine.options
    assert (options.prefetch_ahead, options.prefetch_cache_size, options.prefetch_workers) == (AHEAD, 9, 2)


def test_waiting_requests_are_prefetched_in_the_order_of_the_queue(served: Served, expected: list[Answer]) -> None:
    """While the first runs, the next `prefetch_ahead` come to host memory; from there they are loaded."""
    served.run_first()
    before = served.worker.engine.stats()
    names = [served.add(prompt) for prompt in OTHERS]
    served.store.loaded.clear()
    answers = {}

    def step() -> None:
        answers.update((output.request_id, output) for output in served.engine.step() if output.finished)

    def prefetched() -> bool:
        step()
        # on a busy machine the threads that load are late, and the first must not end before them
        return eventually(lambda: len(served.store.loaded) >= 9, seconds=0.2)

    assert eventually(prefetched)
    assert not answers, "the first still runs"
    time.sleep(0.05)
    assert len(served.store.loaded) == 9, "6 blocks of the next, 3 of the one behind it: no more fit"
    while len(answers) < 5:
        step()
    served.settle()
    after = served.worker.engine.stats()
    assert after.blocks_cached - before.blocks_cached >= 9
    assert [list(answers[name].outputs[0].token_ids) for name in names] == [answer.tokens for answer in expected[1:]]
    assert [answers[name].num_cached_tokens for name in names] == [96, 48, 80, 64]


def test_steps_without_tokens_rest(served: Served, expected: list[Answer]) -> None:
    """The threads that load need Python's lock, which an engine that comes again at once would keep from them."""
    served.store.load_seconds = 0.1
    served.worker.engine._dispatcher.cache.clear()
    name, steps, begin = served.add(PROMPTS[1]), 0, time.monotonic()
    while not served.engine.core.scheduler.running:
        served.engine.step()
        steps += 1
    assert time.monotonic() - begin > 0.3, "6 blocks, 2 threads"
    assert steps < 250, "each of them waits for 2 ms"
    served.store.load_seconds = 0.0
    found = None
    while found is None:
        found = next((output for output in served.engine.step() if output.finished), None)
    assert (found.request_id, list(found.outputs[0].token_ids)) == (name, expected[1].tokens)
    served.settle()


def test_a_store_that_fails_prefetches_nothing_and_answers_are_the_same(served: Served, expected: list[Answer]) -> None:
    """covers: C6 C8"""
    served.store.raises = True
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    served.settle()
    served.store.heal()


def test_requests_that_leave_the_queue_take_their_prefetch_along(served: Served, expected: list[Answer]) -> None:
    """covers: C5 C9. Aborted while they wait, and the id of one is used again."""
    served.run_first()
    served.store.load_seconds = 0.05
    names = [served.add(prompt) for prompt in OTHERS]
    for _ in range(3):
        served.engine.step()
    served.engine.llm.llm_engine.abort_request(names, internal=False)
    finished = []
    while served.engine.core.scheduler.has_unfinished_requests():
        finished += [output.request_id for output in served.engine.step() if output.finished]
    assert not set(finished).intersection(names)
    served.engine.step()
    assert served.worker.engine.stats().pending == 0
    served.store.load_seconds = 0.0
    served.settle()
    served.engine.add(names[0], PROMPTS[2], greedy_params(OUTPUTS))
    found = None
    while found is None:
        found = next((output for output in served.engine.step() if output.finished), None)
    assert list(found.outputs[0].token_ids) == expected[2].tokens
    served.settle()


def test_the_phase_log_and_metrics_tell_what_was_moved(served: Served) -> None:
    """Last: over everything before. Blocks that were loaded stand in the line of a step, and on /metrics."""
    served.engine.greedy(PROMPTS[:2], 2)
    served.settle()
    assert served.phase_log is not None
    steps = read_phase_log(served.phase_log)[1]
    loads = served.worker.loads.counts
    assert 0 < sum(step.loaded_blocks for step in steps) == loads.loaded_blocks
    assert 0 < sum(step.saved_blocks for step in steps) <= served.worker.saver.counts().saved
    assert all(step.transfer_ms > 0 for step in steps)
    folder = metrics_folder(served.engine.core.vllm_config.instance_id)

    def on_metrics(event: str) -> float:
        return scrape(folder).get(f'gaudi_ucm_kv_blocks_total{{engine="0",event="{event}"}}', 0)

    assert eventually(lambda: on_metrics("loaded") == loads.loaded_blocks)
    assert on_metrics("recomputed") == loads.failed_blocks > 0
    counts = served.scheduler.counts
    assert on_metrics("hit") == counts.hit_blocks == loads.loaded_blocks + loads.failed_blocks
    assert on_metrics("missed") == counts.missed_blocks
    seen = scrape(folder)
    assert seen['gaudi_ucm_kv_lookups_total{engine="0",result="answered"}'] == counts.requests - counts.timeouts > 0
    assert seen['gaudi_ucm_prefetch_blocks_total{engine="0",result="cached",use="connector"}'] >= 9
    assert seen['gaudi_ucm_store_breaker{engine="0",store="fault"}'] == 0
