"""Asynchronous scheduling beside what decides over blocks: they move, are copied and leave while a step runs, and no
token changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import admission as admitted
from tests.engine.compaction import MANY, OPTIONS, SMALL, Watched, assert_served
from tests.engine.partial_hits import gsa
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.swap import ARRIVALS, LENGTH, PROMPTS, Poisoned, assert_swapped, preemption
from tests.engine.swap import SMALL as SMALL_FOR_SWAPS
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

AHEAD: dict[str, Any] = {"scheduler": {"async_scheduling": True}}
STATIC = {"mode": "eager", "max_graphs": 12}
BLOCKS: dict[str, Any] = {**AHEAD, "kv_cache": {"compaction": True, "partial_hits": True}}


def drafts_of(model: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(roomy: Engine) -> list[Answer]:
    return [roomy.greedy([one.prompt], one.max_tokens)[0] for one in MANY]


@pytest.fixture(scope="module")
def wanted_of_swaps(roomy: Engine) -> list[Answer]:
    return roomy.alone(PROMPTS, LENGTH)


@pytest.mark.parametrize("kind", ["true shapes", "static", "drafts", "sparse", "sparse static"])
def test_blocks_move_and_are_copied(tiny_llama: Path, wanted: list[Answer], kind: str, tmp_path: Path) -> None:
    """Arrivals, ends, aborts and preemption; free blocks and the dummy block are NaN. covers: A7 A20 A21"""
    log = tmp_path / "log.jsonl"
    ucm = {**BLOCKS, "phase_log": str(log)}
    if "static" in kind:
        ucm["graphs"] = STATIC
    if "sparse" in kind:
        # a budget of all blocks, so that tokens are those of dense attention
        ucm.update(gsa(1.0))
    options = {**OPTIONS, **SMALL, "speculative_config": drafts_of(tiny_llama) if kind == "drafts" else None}
    with Engine(tiny_llama, ucm, **options) as engine:
        assert engine.core.batch_queue_size == 2
        watched = Watched(engine)
        assert_served(watched.serve(MANY), wanted)
        assert engine.preemptions
        totals = engine.core.scheduler.block_policies.totals
        assert totals.copies
        memory = engine.runner.parts.memory
        assert memory is not None
        unsaid = memory.take_work().get("moved_blocks", 0)
    records = read_phase_log(log)[1]
    # each move is told once
    assert unsaid + sum(record.moved_blocks for record in records) == totals.moves > 0
    assert sum(record.copied_blocks for record in records) > 0


@pytest.mark.parametrize("kind", ["swap", "auto", "drafts", "sparse"])
def test_preempted_requests_come_back(tiny_llama: Path, wanted_of_swaps: list[Answer], kind: str) -> None:
    """Their blocks leave behind a step that still runs. covers: A7"""
    mode = "auto" if kind == "auto" else "swap"
    speculation = drafts_of(tiny_llama) if kind == "drafts" else None
    ucm, options = {**AHEAD, **preemption(mode)}, {**SMALL_FOR_SWAPS, "speculative_config": speculation}
    if kind == "sparse":
        ucm.update(gsa(1.0))
    if speculation:
        options["num_gpu_blocks_override"] = 20
    with Poisoned(tiny_llama, ucm, **options) as engine:
        assert engine.core.batch_queue_size == 2
        answers = engine.staggered(PROMPTS, ARRIVALS, LENGTH)
        if mode == "swap":
            assert_swapped(engine, answers, wanted_of_swaps)
        else:
            assert_same(answers, wanted_of_swaps)
            assert engine.preemptions > 2
        assert engine.swaps is not None
        assert engine.swaps.cost.rates.are_known


@pytest.mark.parametrize("with_drafts", [False, True], ids=["tokens", "drafts"])
def test_exact_admission_never_preempts(tiny_llama: Path, roomy: Engine, with_drafts: bool) -> None:
    """Not even where a step ahead has room for the drafts of two."""
    answers = [
        roomy.greedy([prompt], length)[0] for prompt, length in zip(admitted.PROMPTS, admitted.LENGTHS, strict=True)
    ]
    options = {**admitted.SMALL, "speculative_config": drafts_of(tiny_llama) if with_drafts else None}
    ucm = {"scheduler": {"admission": "exact", "async_scheduling": True}}
    with Engine(tiny_llama, ucm, **options) as engine:
        assert engine.core.batch_queue_size == 2
        params = [greedy_params(length) for length in admitted.LENGTHS]
        found = admitted.serve(engine, params)
        assert found == {f"r{index}": answer.tokens for index, answer in enumerate(answers)}
        assert engine.core.scheduler.block_policies.totals.admission_waits
        assert engine.preemptions == 0
        for _ in range(3):
            engine.step()
        engine.check_idle()


@pytest.mark.parametrize("kind", ["true shapes", "static", "drafts"])
def test_a_slot_for_each_token(tiny_llama: Path, roomy: Engine, kind: str) -> None:
    """Slots that a request has had are another's in the next step. covers: A7 D1"""
    prompts = admitted.PROMPTS
    cache = {"granularity": "token", "max_total_token_num": 320}
    ucm = {**AHEAD, "kv_cache": cache, **({"graphs": STATIC} if kind == "static" else {})}
    options = {"max_num_batched_tokens": 48, "speculative_config": drafts_of(tiny_llama) if kind == "drafts" else None}
    with Engine(tiny_llama, ucm, max_model_len=256, **options) as engine:
        assert engine.core.batch_queue_size == 2
        assert_same(engine.staggered(prompts, admitted.ARRIVALS, LENGTH), roomy.alone(prompts, LENGTH))
        assert engine.preemptions
        for _ in range(3):
            engine.step()
        engine.check_idle()
