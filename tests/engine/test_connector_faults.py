"""Our connector with a store that fails in every way: tokens are those without a store, and nothing waits for long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connector.fault_store import FaultStore
from tests.engine.connector_faults import LOAD_DEADLINE, LOOKUP_DEADLINE, transfer
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.connector.scheduler_side import LookupCounts
from vllm_gaudi_ucm.connector.worker_side import LoadCounts

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
RNG = random.Random(21)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(64)
# aligned and not, shorter than a block, one block and a token, shared prefixes
PROMPTS = [tokens(5), tokens(16), tokens(17), tokens(96), COMMON + tokens(30), COMMON + tokens(16), COMMON]
STATIC = {"graphs": {"mode": "eager", "max_graphs": 8, "warm_up": "full"}}
# the next step is planned while one runs
AHEAD: dict[str, Any] = {"scheduler": {"async_scheduling": True}}
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 96}
OUTPUTS = 20


class Served:
    """An engine with the connector over a fault store. Local prefix caching is off: hits come from the store."""

    def __init__(self, engine: Engine, store: FaultStore) -> None:
        self.engine = engine
        self.store = store
        assert engine.runner.transfer is not None
        connector: Any = engine.runner.transfer.connector
        self.worker = connector.worker_side
        self.scheduler = engine.core.scheduler.connector.scheduler_side

    def fill(self) -> None:
        """The store works, and holds every block of the prompts and their answers, once; nothing was counted yet."""
        self.store.heal()
        self.store.clear()
        self.scheduler.known.clear()
        self.engine.greedy(PROMPTS, OUTPUTS)
        self.settle()
        self.store.saved.clear()
        self.store.loaded.clear()
        self.worker.engine.stop()
        self.worker.engine.start()
        self.worker.loads.counts = LoadCounts()
        self.scheduler.counts = LookupCounts()

    def step_until_loading(self) -> None:
        """Until a request waits for its blocks; the test's requests must be slow to load."""
        for _ in range(500):
            self.engine.step()
            if len(self.worker.loads):
                return
        raise AssertionError(f"nothing is loaded: {self.worker.loads.counts}, {self.worker.engine.stats()}")

    def settle(self) -> None:
        """Nothing is left of any request, on the device, in the connector, or on its way to the store."""
        for _ in range(3):
            self.engine.step()
        assert self.worker.saver.flush(60.0)
        self.worker.saver.check_integrity()
        self.worker.engine.check_integrity()
        assert len(self.worker.loads) == 0
        assert self.scheduler.num_requests == 0
        self.engine.check_idle()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, OUTPUTS)


@pytest.fixture(
    scope="module",
    params=[{}, AHEAD, {**STATIC, **AHEAD}],
    ids=["true shapes", "ahead", "static ahead"],
)
def served(tiny_llama: Path, expected: list[Answer], request: pytest.FixtureRequest) -> Iterator[Served]:
    store = FaultStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
        with Engine(
            tiny_llama, request.param, kv_transfer_config=transfer(), enable_prefix_caching=False, **OPTIONS
        ) as engine:
            yield Served(engine, store)
            store.heal()


def hits(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


ALL_HIT = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def test_a_filled_store_takes_the_place_of_prefill(served: Served, expected: list[Answer]) -> None:
    served.store.clear()
    served.scheduler.known.clear()
    first = served.engine.greedy(PROMPTS, OUTPUTS)
    served.settle()
    assert_same(first, expected)
    assert len(served.store.saved) == len(set(served.store.saved)) == len(served.store.blocks)
    served.store.saved.clear()
    second = served.engine.greedy(PROMPTS, OUTPUTS)
    served.settle()
    assert_same(second, expected)
    assert hits(second) == ALL_HIT
    # what was loaded, and what is computed anew behind it, is there already
    assert served.store.saved == []
    # an answer's blocks are there, too
    whole = served.engine.greedy([PROMPTS[3] + expected[3].tokens], 1)
    assert hits(whole) == [(96 + OUTPUTS - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize("fault", ["fails", "raises"])
def test_loads_that_all_fail(served: Served, expected: list[Answer], fault: str) -> None:
    """covers: C6 C8. Each block is asked for once per request, and computed."""
    served.fill()
    setattr(served.store, fault, True)
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    served.settle()
    counts = served.worker.loads.counts
    assert (counts.loaded_blocks, counts.failed_blocks) == (0, sum(ALL_HIT) // BLOCK)
    assert counts.requests == sum(hit > 0 for hit in ALL_HIT)
    # what was computed again is stored again
    assert set(served.store.loaded) == set(served.store.saved)


def test_a_block_that_is_lost_in_the_middle(served: Served, expected: list[Answer]) -> None:
    """covers: C8 D3. What is before it is used; it and what follows is computed."""
    served.fill()
    keys = list(served.store.blocks)
    served.store.lost = set(keys[1::3])
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    served.settle()
    assert served.worker.loads.counts.failed_blocks > 0
    assert served.worker.loads.counts.loaded_blocks > 0


def test_a_store_that_hangs(served: Served, expected: list[Answer]) -> None:
    """covers: C7 D4. Loads are given up after the deadline, saves are dropped, no step waits."""
    served.fill()
    served.store.delete(list(served.store.blocks)[-6:])
    served.scheduler.known.clear()
    served.store.goes_on.clear()
    start = time.monotonic()
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    # the deadline, and what a busy machine needs for the computation
    assert time.monotonic() - start < LOAD_DEADLINE + 20
    counts = served.worker.loads.counts
    assert counts.timeouts == counts.requests > 0
    assert counts.loaded_blocks == 0
    served.store.heal()
    served.settle()
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    served.settle()


def test_a_store_that_does_not_answer_lookups(served: Served, expected: list[Answer]) -> None:
    """covers: D4. A request waits for the deadline of a look-up, and runs without the store."""
    served.fill()
    served.store.lookup_seconds = LOOKUP_DEADLINE + 0.2
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    assert served.scheduler.counts.timeouts > 0
    assert served.worker.loads.counts.requests == 0
    served.store.heal()
    served.store.lookup_raises = True
    assert_same(served.engine.greedy(PROMPTS, OUTPUTS), expected)
    assert served.worker.loads.counts.requests == 0
    time.sleep(0.1)
    served.settle()


def test_aborted_in_the_middle_of_a_load(served: Served, expected: list[Answer]) -> None:
    """covers: C9. Blocks are reused only once nothing writes to them; whoever gets them is not disturbed."""
    served.fill()
    engine, free = served.engine, served.engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    for is_early in (False, True, False, True):
        served.store.goes_on.clear()
        ids = [engine.new_id() for _ in PROMPTS]
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            engine.add(request_id, prompt, greedy_params(OUTPUTS))
        served.step_until_loading()
        assert free() < before
        if is_early:
            # now blocks are delivered while the requests are aborted
            served.store.goes_on.set()
        engine.llm.llm_engine.abort_request(ids, internal=False)
        engine.step()
        served.store.goes_on.set()
        # the blocks of these may be those of the aborted ones, as soon as they are free
        assert_same(engine.greedy(PROMPTS[::-1], OUTPUTS), expected[::-1])
    assert served.worker.loads.counts.cancelled > 0
    served.settle()
    assert free() == before


def test_a_reused_id_gets_its_own_blocks(served: Served, expected: list[Answer]) -> None:
    """covers: C5 D7"""
    served.fill()
    served.store.goes_on.clear()
    engine = served.engine
    engine.add("same", PROMPTS[3], greedy_params(OUTPUTS))
    served.step_until_loading()
    engine.llm.llm_engine.abort_request(["same"], internal=False)
    engine.add("same", PROMPTS[4], greedy_params(OUTPUTS))
    served.store.goes_on.set()
    outputs = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == expected[4].tokens
    served.settle()


def test_salts_and_other_requests_share_nothing(served: Served) -> None:
    """covers: D1 D5. Whatever the salt is, the engine goes on."""
    served.fill()
    prompt = PROMPTS[3]
    params = greedy_params(1)
    found = []
    for salt in ("a", "b", "a", "\ud800", "a" * 9999):
        one: Any = {"prompt_token_ids": prompt, "cache_salt": salt}
        found.append(served.engine.llm.generate(one, params, use_tqdm=False)[0].num_cached_tokens)
        served.settle()
    assert found == [0, 0, 80, 0, 0]


def test_blocks_that_the_store_refuses_are_offered_again(served: Served) -> None:
    served.store.heal()
    served.store.clear()
    served.scheduler.known.clear()
    served.store.refuses = True
    served.engine.greedy(PROMPTS, 1)
    served.settle()
    assert not served.store.blocks
    # the worker tells with the next step
    served.engine.greedy(PROMPTS[:1], 1)
    served.store.heal()
    served.engine.greedy(PROMPTS, 1)
    served.settle()
    assert len(served.store.blocks) == len(served.scheduler.known) > 0


def test_the_store_is_emptied_with_the_prefix_cache(served: Served) -> None:
    served.fill()
    assert served.engine.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert not served.store.blocks
    assert hits(served.engine.greedy(PROMPTS[3:4], 1)) == [0]
    served.settle()


@pytest.mark.parametrize("ucm", [{}, AHEAD], ids=["in turn", "ahead"])
@pytest.mark.parametrize("is_slow", [False, True])
def test_preempted_requests_load_and_save_again(
    tiny_llama: Path, expected: list[Answer], is_slow: bool, ucm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: A7 C9. Prefix caching is on: blocks come from the device, the store, or are computed."""
    store = FaultStore()
    store.load_seconds = 0.005 if is_slow else 0.0
    monkeypatch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
    options = {**OPTIONS, "num_gpu_blocks_override": 24}
    with Engine(tiny_llama, ucm, kv_transfer_config=transfer(), **options) as engine:
        served = Served(engine, store)
        for _ in range(3):
            assert_same(engine.staggered(PROMPTS, range(len(PROMPTS)), OUTPUTS), expected)
        assert engine.preemptions > 0
        served.settle()
