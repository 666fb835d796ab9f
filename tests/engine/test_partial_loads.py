"""Stored prompts of which no more than a block is computed: what its rows can do without stays in the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.connector.fault_store import FaultStore
from tests.engine.connector import transfer
from tests.engine.memory_mode import check_finite, generated, ucm
from tests.engine.memory_mode_transfer import Served, store_options
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.sparse import OPTIONS, tokens
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.records import GraphState
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
PROMPT = tokens(20 * BLOCK + 1)
OTHER = PROMPT[: 10 * BLOCK] + tokens(7 * BLOCK + 1)
# two tokens, half a block and a block behind the blocks that are loaded
TAILED = [PROMPT[3:][: 16 * BLOCK + 2], PROMPT[5:][: 15 * BLOCK + BLOCK // 2], PROMPT[7:][: 14 * BLOCK + BLOCK]]
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
DENSE = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, extra_args={"ucm_sparse": False})
RESIDENT = 8  # of 20, with on_device_ratio 0.4


@pytest.mark.parametrize(("kind", "static", "tail"), [("memory", False, 7), ("file", True, 7)], ids=["true", "static"])
def test_only_a_part_is_loaded(tiny_llama: Path, kind: str, static: bool, tail: int, tmp_path: Path) -> None:
    """covers: C4 C8 C10. The first step is sparse and scores what is in the store; nobody reads what is absent."""
    prompt = PROMPT[:-1] + tokens(tail)
    log = tmp_path / "phases.jsonl"
    config = {**ucm(static=static), "phase_log": str(log)}
    with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=transfer(store_options(kind, tmp_path))) as engine:
        served = Served(engine)
        served.serve([prompt], 4)
        served.forget()
        totals, counts = served.watched.offload.totals, served.worker.load_counts
        scored = totals.scored
        assert served.serve([prompt], 1) == [20 * BLOCK]
        assert (totals.stored, counts.loaded_blocks) == (20 - RESIDENT, RESIDENT)
        assert totals.scored == scored + 1
        assert totals.missed > 0
        served.forget()
        before = totals.loaded
        served.serve([prompt], 40)
        assert counts.loaded_blocks == 2 * RESIDENT
        assert totals.loaded > before, "blocks come back from the connector's store"
        assert not totals.failed
        served.settle()
    records = read_phase_log(log)[1]
    assert sum(record.loaded_blocks for record in records) == 2 * RESIDENT
    step = next(record for record in records if record.loaded_blocks)
    assert (step.tokens, step.sparse) == (tail, 1)


@pytest.mark.parametrize(
    ("prompt", "static", "options", "loaded"),
    [
        (PROMPT, False, {}, RESIDENT),
        (PROMPT, False, {"partial_loads": False}, 20),
        (PROMPT, False, {"load_failure": "fail"}, 20),
        (PROMPT[:-1], False, {}, RESIDENT),
        (PROMPT + tokens(1), True, {}, RESIDENT),
    ],
    ids=["part", "option", "fail", "a block to compute", "two tokens, static"],
)
def test_when_a_load_is_partial(
    tiny_llama: Path, prompt: list[int], static: bool, options: dict[str, Any], loaded: int
) -> None:
    config = transfer(memory_store(), **options)
    with Engine(tiny_llama, ucm(static=static), **OPTIONS, kv_transfer_config=config) as engine:
        served = Served(engine)
        served.serve([prompt], 2)
        served.forget()
        assert served.serve([prompt], 2) == [(len(prompt) - 1) // BLOCK * BLOCK]
        assert served.worker.load_counts.loaded_blocks == loaded
        assert served.watched.offload.totals.stored == (len(prompt) - 1) // BLOCK - loaded
        served.settle()


def memory_store() -> dict[str, Any]:
    return {"kind": "memory", "capacity": "64MiB"}


def forget_stored(engine: Engine) -> None:
    """The device's prefix cache knows nothing any more, once everything is stored."""
    for _ in range(3):
        engine.step()
    assert engine.runner.transfer is not None
    connector: Any = engine.runner.transfer.connector
    assert connector.worker_side.saver.flush(60.0)
    assert engine.core.scheduler.reset_prefix_cache()


@pytest.fixture(scope="module")
def loaded_whole(tiny_llama: Path) -> Iterator[tuple[list[Answer], list[list[int]]]]:
    """GSA alone over a store, with all blocks on the device: greedy answers, and a sampled one."""
    config = ucm()
    del config["memory_mode"]
    with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=transfer(memory_store())) as engine:
        engine.greedy([PROMPT, OTHER, *TAILED], 1)
        forget_stored(engine)
        found = engine.greedy([PROMPT, OTHER, *TAILED], 12)
        forget_stored(engine)
        yield found, generated(engine.generate([PROMPT], SEEDED))


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_a_first_step_that_missed_too_much_is_repeated(
    tiny_llama: Path, loaded_whole: tuple[list[Answer], list[list[int]]], static: bool
) -> None:
    """covers: C1. Nothing may be missed, so that all blocks come before the first token: answers are those of a whole
    load with all blocks on the device, and no token comes twice. Tails are computed in chunks the second time."""
    prompts = [PROMPT, OTHER, *TAILED]
    config = transfer(memory_store())
    with Engine(tiny_llama, ucm(static=static, max_missed=0.0), **OPTIONS, kv_transfer_config=config) as engine:
        served = Served(engine)
        engine.greedy(prompts, 1)
        totals = served.watched.offload.totals
        for chunk in (0, 6):
            served.forget()
            before = totals.repeated
            engine.core.scheduler.scheduler_config.long_prefill_token_threshold = chunk
            found = engine.greedy(prompts, 12)
            assert totals.repeated == before + len(prompts)
            assert_same(found, loaded_whole[0])
            assert [answer.cached_tokens for answer in found] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
        assert totals.stored
        served.forget()
        sampled = generated(engine.generate([PROMPT], SEEDED))
        assert totals.repeated == before + len(prompts) + 1
        # at static shapes another sampler draws
        assert static or sampled == loaded_whole[1], "the token that was taken back has drawn nothing"
        served.settle()


def test_tails_at_static_shapes(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: B1 C16. Beside a decode and a new prompt, whole and in chunks: answers are those of true shapes, and each
    tail has run alone, in a graph of a block of rows, or as many of it as the scheduler gave."""
    found: list[list[Answer]] = []
    fresh = tokens(20)
    for static in (False, True):
        log = tmp_path / f"{static}.jsonl"
        config = {**ucm(static=static), "phase_log": str(log)}
        # each has a store of its own: what is wanted more often is loaded rather
        stored = transfer(store_options("file", tmp_path / str(static)))
        with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=stored) as engine:
            served = Served(engine)
            if engine.runner.static is not None:
                graphs = [r for r in engine.runner.static.summary().records if isinstance(r.key, RemainderShape)]
                assert [graph.state for graph in graphs] == 3 * [GraphState.WARM]
            engine.greedy(TAILED, 1)
            found.append([])
            for chunk in (0, 6):
                served.forget()
                engine.core.scheduler.scheduler_config.long_prefill_token_threshold = chunk
                engine.add("decode", tokens(10), DENSE)
                served.watched.step()
                # one token: what is on the device for later ones depends on time
                found[-1] += map(answer_of, served.watched.generate([*TAILED, fresh[chunk:]], 1))
                engine.llm.llm_engine.abort_request(["decode"])
            totals, counts = served.watched.offload.totals, served.worker.load_counts
            assert [answer.cached_tokens for answer in found[-1]] == 2 * [256, 240, 224, 0]
            assert (totals.stored, counts.loaded_blocks, totals.repeated) == (52, 38, 0)
            served.settle()
    # a tail in several steps chooses anew in each, among what has come back by then, which depends on time
    one_step = [0, 1, 2, 3, 4, 7]
    assert_same([found[1][i] for i in one_step], [found[0][i] for i in one_step])
    sparse = [record for record in read_phase_log(log)[1] if record.sparse]
    assert {record.requests for record in sparse} == {1}
    assert sorted(record.tokens for record in sparse) == sorted([2, 8, 16, 2, 6, 2, 6, 6, 4])
    assert {record.padded.query_len for record in sparse} == {BLOCK}
    assert [record for record in read_phase_log(log)[1] if record.prompt_remainder] == sparse


def test_a_block_that_the_same_step_computes_for_another_request(
    tiny_llama: Path, fault_store: FaultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: F5 A19. Poisoned free blocks. What is left of a prompt runs before a request that computes the blocks
    that were left in the store, as the store is gone when that one comes; beside them a dense decode."""
    # the answer comes in the step that asks
    monkeypatch.setattr("vllm_gaudi_ucm.connector.lookup.GRACE_SECONDS", 5.0)
    prompt = PROMPT[:-1] + tokens(7)
    with Engine(tiny_llama, ucm(static=True), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        served.serve([prompt], 2)
        served.forget()
        engine.add("decode", tokens(10), DENSE)
        engine.add("part", prompt, greedy_params(8))
        scheduler = engine.core.scheduler
        while not scheduler.finished_recving_kv_req_ids:
            served.watched.step()
        assert served.watched.offload.totals.stored == 20 - RESIDENT
        fault_store.lookup_raises = True
        engine.add("whole", prompt, greedy_params(8))
        check_finite(served.watched.finish(["part", "whole"]))
        engine.llm.llm_engine.abort_request(["decode"])
        fault_store.heal()
        served.settle()


def test_a_repeated_step_with_drafts(tiny_llama: Path) -> None:
    """covers: C16. Those behind the token that was taken back are not verified."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    prompt = (PROMPT[:50] * 7)[: 20 * BLOCK + 1]
    config = transfer(memory_store())
    given = {**OPTIONS, "speculative_config": speculative, "kv_transfer_config": config}
    with Engine(tiny_llama, ucm(max_missed=0.0), **given) as engine:
        served = Served(engine)
        (first,) = generated(served.watched.generate([prompt], 30))
        served.forget()
        found = served.watched.generate([prompt], 30)
        check_finite(found)
        assert served.watched.offload.totals.repeated == 1
        assert len(generated(found)[0]) == len(first)
        served.settle()


def test_a_share_that_may_be_missed_is_no_reason_to_repeat(tiny_llama: Path) -> None:
    config = transfer(memory_store())
    with Engine(tiny_llama, ucm(max_missed=1.0), **OPTIONS, kv_transfer_config=config) as engine:
        served = Served(engine)
        served.serve([PROMPT], 2)
        served.forget()
        served.serve([PROMPT], 8)
        totals = served.watched.offload.totals
        assert totals.stored
        assert not totals.repeated
        assert not totals.kept


# What a slow look-up has had prefetched would be found in host memory, whatever the store has lost.
LITTLE = {"prefetch_cache_size": 1}


def stored_prompt(served: Served) -> None:
    served.serve([PROMPT], 2)
    served.forget()


def test_records_of_summaries_that_are_gone(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: C8. Missing, or missing although the store said otherwise: the load is whole; they are saved again."""
    with Engine(
        tiny_llama, ucm(), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"}, prefetch=LITTLE)
    ) as engine:
        served = Served(engine)
        stored_prompt(served)
        counts, totals = served.worker.load_counts, served.watched.offload.totals
        blocks, records = fault_store.asked[:20], fault_store.asked[20:]
        assert set(fault_store.saved) == {*blocks, *records}
        assert len(records) == served.worker.saver.counts().records > 1
        fault_store.delete(records[:1])
        served.scheduler.known.discard(records)
        assert served.serve([PROMPT], 2) == [20 * BLOCK]
        assert (counts.loaded_blocks, totals.stored) == (20, 0)
        served.forget()
        assert records[0] in fault_store.blocks
        fault_store.lost = {records[-1]}
        assert served.serve([PROMPT], 2) == [20 * BLOCK]
        assert (counts.loaded_blocks, counts.failed_blocks) == (40, 0)
        served.settle()


def test_blocks_that_cannot_be_loaded(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: C8. Blocks before it may be absent, so all are loaded, and it is computed with what follows it."""
    with Engine(
        tiny_llama, ucm(), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"}, prefetch=LITTLE)
    ) as engine:
        served = Served(engine)
        stored_prompt(served)
        fault_store.lost = {fault_store.asked[18]}
        check_finite(served.watched.generate([PROMPT], 20))
        assert served.worker.load_counts.loaded_blocks == 19
        assert served.worker.load_counts.failed_blocks == 2
        fault_store.heal()
        served.settle()


def test_a_waiting_request_is_prefetched_in_part(tiny_llama: Path, fault_store: FaultStore) -> None:
    """What it will leave in the store is not brought to host memory either."""
    options = {**OPTIONS, "max_num_seqs": 1}
    with Engine(tiny_llama, ucm(), **options, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        stored_prompt(served)
        fault_store.loaded.clear()
        engine.add("a", tokens(30), greedy_params(60))
        engine.add("b", PROMPT, greedy_params(1))
        finished = {output.request_id for _ in range(55) for output in served.watched.step() if output.finished}
        assert not finished
        records = served.worker.saver.counts().records
        assert len(set(fault_store.loaded)) == len(fault_store.loaded) == RESIDENT + records
        check_finite(served.watched.finish(["a", "b"]))
        assert served.worker.load_counts.loaded_blocks == RESIDENT
        served.settle()


def test_blocks_that_come_late(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: C5. They are computed, and not asked for again."""
    config = transfer({"kind": "memory"}, load_deadline=0.1)
    with Engine(tiny_llama, ucm(), **OPTIONS, kv_transfer_config=config) as engine:
        served = Served(engine)
        stored_prompt(served)
        fault_store.load_seconds = 0.2
        check_finite(served.watched.generate([PROMPT], 5))
        assert served.worker.load_counts.requests == 1
        assert served.worker.load_counts.loaded_blocks == 0
        fault_store.heal()
        served.settle()


def test_blocks_that_the_store_has_evicted(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: C8. Away for good, counted, and never attended."""
    with Engine(tiny_llama, ucm(), **OPTIONS, kv_transfer_config=transfer({"kind": "memory"})) as engine:
        served = Served(engine)
        stored_prompt(served)
        engine.add("a", PROMPT, greedy_params(60))
        while not served.worker.load_counts.loaded_blocks:
            served.watched.step()
        fault_store.clear()
        check_finite(served.watched.finish(["a"]))
        assert served.watched.offload.totals.failed
        served.settle()


def test_requests_that_end_while_a_part_is_loaded(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: A3 A7 C5 C8 C9. Several requests with common prefixes, slow loads, lost blocks and records, repeated
    steps, aborts in any state, preemptions, resets of caches, ids used again."""
    rng = random.Random(5)
    options: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 70}
    config = transfer({"kind": "memory"}, load_deadline=0.2, prefetch={"prefetch_cache_size": 1})
    prompts = [PROMPT, OTHER, PROMPT[: 13 * BLOCK], tokens(90)]
    with Engine(tiny_llama, ucm(moves_per_step=4, max_missed=0.1), **options, kv_transfer_config=config) as engine:
        served = Served(engine)
        served.serve(prompts, 3)
        served.settle()
        live: set[str] = set()
        for turn in range(120):
            fault_store.load_seconds = rng.choice([0.0, 0.0, 0.002, 0.01])
            fault_store.lost = set(list(fault_store.blocks)[rng.randrange(5) :: 31]) if turn % 3 == 0 else set()
            name = f"r{rng.randrange(9)}"
            if name not in live and len(live) < 5:
                live.add(name)
                engine.add(name, rng.choice(prompts), greedy_params(rng.randint(1, 50)))
            if live and rng.random() < (0.4 if served.worker.num_loading else 0.1):
                gone = name if name in live else rng.choice(sorted(live))
                engine.llm.llm_engine.abort_request([gone])
                live.discard(gone)
            if rng.random() < 0.4:
                # vLLM cannot preempt those that wait for a load; those that ended in one hold their blocks for as long
                ended = any(request.is_finished() for request in engine.core.scheduler.requests.values())
                waits = bool(engine.core.scheduler.kv_holding_waiting) or ended
                engine.core.scheduler.reset_prefix_cache(reset_running_requests=not waits and rng.random() < 0.2)
            for _ in range(rng.choice([1, 1, 2, 6])):
                outputs = [output for output in served.watched.step() if output.finished]
                check_finite(outputs)
                live -= {output.request_id for output in outputs}
        engine.llm.llm_engine.abort_request(sorted(live))
        fault_store.heal()
        served.settle()
        # whatever the threads' turns were above: one whose blocks are lost, and one that ends while it loads
        served.forget()
        fault_store.lost = set(fault_store.blocks)
        check_finite(served.watched.generate([PROMPT], 2))
        fault_store.heal()
        served.settle()
        served.forget()
        fault_store.load_seconds = 0.05
        engine.add("last", PROMPT, greedy_params(2))
        while not served.worker.num_loading:
            served.watched.step()
        engine.llm.llm_engine.abort_request(["last"])
        fault_store.heal()
        served.settle()
        counts, totals = served.worker.load_counts, served.watched.offload.totals
        assert counts.cancelled
        assert counts.failed_blocks
        assert totals.stored
        assert totals.repeated
        assert totals.loaded + totals.found
        served.serve(prompts, 20)
        served.settle()
        for block in fault_store.blocks.values():
            assert np.isfinite(np.frombuffer(block, np.float32)[:1]).all()
