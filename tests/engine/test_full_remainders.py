"""Prompts that end with a full block, after a partial load: who finds that block, and when. Preemptions beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.connector.fault_store import FaultStore
from tests.engine.connector import transfer
from tests.engine.memory_mode import ucm
from tests.engine.memory_mode_transfer import Served
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.sparse import OPTIONS, tokens

BLOCK = 16
PROMPT = tokens(20 * BLOCK + 1)
FULL = PROMPT[: 13 * BLOCK]
"""Its last block is computed with 12 that are stored, and PROMPT has it, too."""
DENSE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, extra_args={"ucm_sparse": False})


@pytest.fixture(scope="module")
def dense_answer(tiny_llama: Path) -> Answer:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy([PROMPT], 4)[0]


def wait_for_a_repeated_step(served: Served, store: FaultStore) -> None:
    """FULL is asked for as request "a", whose first step was taken back; what it waits for does not come for now."""
    served.serve([PROMPT, FULL], 2)
    served.forget()
    served.engine.add("a", FULL, greedy_params(20))
    while not served.watched.offload.totals.repeated:
        served.watched.step()
    store.goes_on.clear()


def finish(served: Served) -> None:
    while served.engine.core.scheduler.has_unfinished_requests():
        served.watched.step()
    served.settle()


def test_a_block_is_found_by_others_once_the_step_stands_that_has_filled_it(
    tiny_llama: Path, fault_store: FaultStore
) -> None:
    """covers: C8 C10. Not while that step may be repeated: it would be written again under whoever has found it."""
    with Engine(tiny_llama, ucm(max_missed=0.0), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        wait_for_a_repeated_step(served, fault_store)
        ((name, request),) = engine.core.scheduler.requests.items()
        pool, blocks = engine.core.scheduler.kv_cache_manager.block_pool, served.watched.offload._blocks
        assert pool.get_cached_block(request.block_hashes[12], [0]) is None
        fault_store.goes_on.set()
        while len(blocks.table(name)) < 14:
            served.watched.step()
        assert pool.get_cached_block(request.block_hashes[12], [0]) == [blocks.table(name)[12]]
        finish(served)


def test_answers_beside_a_step_that_is_repeated(
    tiny_llama: Path, fault_store: FaultStore, dense_answer: Answer
) -> None:
    """covers: C8 C10. Two dense requests, the second of which finds all blocks of the first on the device, and none
    that the step which was taken back has left."""
    with Engine(tiny_llama, ucm(max_missed=0.0), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        wait_for_a_repeated_step(served, fault_store)
        found = []
        for name in ("first", "second"):
            engine.add(name, PROMPT, DENSE)
            found += [answer_of(output) for output in served.watched.finish([name])]
        assert found[1].cached_tokens == 20 * BLOCK
        fault_store.goes_on.set()
        finish(served)
    assert_same(found, [dense_answer, dense_answer])


def test_a_preempted_request_asks_the_store_again(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: A3 C8. It was computed when the store was empty, and has stored its blocks since."""
    with Engine(tiny_llama, ucm(), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        engine.add("a", PROMPT, greedy_params(12))
        while not served.watched.offload.totals.scored:
            served.watched.step()
        assert served.worker.saver.flush(60.0)
        assert len(fault_store.saved) >= 20
        engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        finish(served)
        assert served.worker.loads.counts.loaded_blocks == 20
