"""Memory mode beside our connector: prompts come from the store, their blocks leave, and nothing absent is stored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.connector.fault_store import FaultStore
from tests.engine.connector import file_store, transfer
from tests.engine.memory_mode import check_finite, copies_of, ucm
from tests.engine.memory_mode_transfer import OUTPUTS, PROMPTS, Served, store_options
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.sparse import OPTIONS, tokens
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16


def loadable(prompt: Sequence[int]) -> int:
    """Tokens of a stored prompt that are loaded: the last one is computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(("kind", "static"), [("memory", False), ("file", True)], ids=["true shapes", "static"])
def test_a_stored_prompt_is_not_computed_and_its_blocks_leave(
    tiny_llama: Path, kind: str, static: bool, tmp_path: Path
) -> None:
    """covers: C8 C10 C11 C20. The second time all prompts come from the store, whichever of their blocks were away."""
    log = tmp_path / "phases.jsonl"
    # with the same options in memory, and yet two stores
    own = store_options("memory", tmp_path)
    config = {**ucm(static=static, store=own), "phase_log": str(log)}
    whole = transfer(store_options(kind, tmp_path), partial_loads=False)
    with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=whole) as engine:
        served = Served(engine)
        first = served.serve()
        served.forget()
        totals = served.watched.offload.totals
        released, scored = totals.released, totals.scored
        assert released
        assert served.serve() == [loadable(prompt) for prompt in PROMPTS]
        assert totals.scored > scored, "blocks that were loaded have summaries"
        assert totals.released > released
        assert not totals.failed
        served.settle()
        assert served.worker.store.stats().blocks
        assert not copies_of(engine).store.stats().blocks
    records = read_phase_log(log)[1]
    cached = sum(first) + sum(map(loadable, PROMPTS))
    assert sum(record.tokens for record in records) == 2 * sum(len(p) + OUTPUTS - 1 for p in PROMPTS) - cached
    # a loaded block may serve two requests
    assert sum(record.loaded_blocks for record in records) >= sum(map(loadable, PROMPTS[:4])) // BLOCK


@pytest.fixture(scope="module")
def without_store(tiny_llama: Path) -> Iterator[list[Answer]]:
    with Engine(tiny_llama, ucm(ratio=1.0, on_device_ratio=1.0), **OPTIONS) as engine:
        yield engine.greedy(PROMPTS, OUTPUTS)


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_answers_are_those_without_a_store(
    tiny_llama: Path, without_store: list[Answer], static: bool, tmp_path: Path
) -> None:
    """All blocks stay and all are chosen, so that answers do not depend on when copies arrive."""
    config = ucm(static=static, ratio=1.0, on_device_ratio=1.0)
    for expected_hits in (0, loadable(PROMPTS[2])):
        with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
            answers = engine.greedy(PROMPTS, OUTPUTS)
            for _ in range(3):
                engine.step()
            engine.check_idle()
        assert_same(answers, without_store)
        assert answers[2].cached_tokens == expected_hits


def test_the_first_step_of_a_stored_prompt_is_sparse(tiny_llama: Path, tmp_path: Path) -> None:
    """Only its last token is left to compute: a decode, whose blocks are summarised in the same step and leave next."""
    prompt = tokens(16 * BLOCK + 1)
    config = {**ucm(), "phase_log": str(tmp_path / "phases.jsonl")}
    with Engine(tiny_llama, config, **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        served = Served(engine)
        served.serve([prompt], 2)
        served.forget()
        scored = served.watched.offload.totals.scored
        assert served.serve([prompt], 1) == [16 * BLOCK]
        assert served.watched.offload.totals.scored == scored + 1
    last = read_phase_log(tmp_path / "phases.jsonl")[1][-1]
    assert (last.tokens, last.sparse) == (1, 1)


def test_preempted_requests_load_what_is_stored(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: A3 A7 C5 C9. Some of their blocks were away when they lost the others."""
    growing = [tokens(80 + 3 * count) for count in range(6)]
    small: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 30, "enable_prefix_caching": False}
    with Engine(tiny_llama, ucm(), **small, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        served = Served(engine)
        for _ in range(2):
            served.serve(growing, 90)
            served.settle()
        assert engine.preemptions
        assert served.watched.offload.totals.released
        assert served.worker.loads.counts.requests > len(growing), "loaded again after a preemption"


def test_requests_that_end_while_blocks_are_on_their_way(tiny_llama: Path, fault_store: FaultStore) -> None:
    """covers: C5 C8 C9. Loads that are slow or lose blocks, aborts in any state, resets of caches, ids used again."""
    rng = random.Random(3)
    options: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 60, "enable_prefix_caching": False}
    config = transfer({"kind": "memory"}, load_deadline=0.2, prefetch={"prefetch_cache_size": 1})
    with Engine(tiny_llama, ucm(moves_per_step=4), **options, kv_transfer_config=config) as engine:
        served = Served(engine)
        served.serve(outputs=20)
        served.settle()
        live: set[str] = set()
        for _ in range(60):
            fault_store.load_seconds = rng.choice([0.0, 0.002, 0.02, 0.05])
            fault_store.lost = set(list(fault_store.blocks)[rng.randrange(5) :: 7])
            name = f"r{rng.randrange(9)}"
            if name not in live and len(live) < 6:
                live.add(name)
                engine.add(name, rng.choice(PROMPTS), greedy_params(rng.randint(1, 60)))
            if live and rng.random() < (0.6 if len(served.worker.loads) else 0.2):
                # the newest is the one that loads, if any
                gone = name if name in live else rng.choice(sorted(live))
                engine.llm.llm_engine.abort_request([gone])
                live.discard(gone)
            if rng.random() < 0.03:
                engine.core.scheduler.reset_prefix_cache(reset_connector=True)
            for _ in range(rng.choice([1, 1, 2, 6])):
                outputs = [output for output in served.watched.step() if output.finished]
                check_finite(outputs)
                live -= {output.request_id for output in outputs}
        engine.llm.llm_engine.abort_request(sorted(live))
        fault_store.heal()
        served.settle()
        # whether one of them ended while it loaded was a matter of time
        for attempt in range(20):
            served.abort_a_load(fault_store, f"late{attempt}")
            if served.worker.loads.counts.cancelled:
                break
        counts = served.worker.loads.counts
        assert counts.cancelled
        assert counts.loaded_blocks
        assert counts.failed_blocks
        assert served.watched.offload.totals.released
        served.serve(outputs=20)
        served.settle()
        stored = b"".join(fault_store.blocks.values())
        assert np.isfinite(np.frombuffer(stored, np.float32)).all(), "no block that was away was stored"
