"""Slots for tokens at static shapes: answers are those of blocks at true shapes, and nothing is compiled for a step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_counts import broken_duties, remains
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.block_policies.token_slots.free_strips import FreeStrips
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(12)
COMMON = [RNG.randrange(3, VOCAB) for _ in range(100)]
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 150))] for _ in range(6)]
PROMPTS += [COMMON[:count] + [RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 60))] for count in (37, 61, 83, 99)]
ARRIVALS = [0, 0, 1, 2, 9, 9, 0, 3, 14, 21]
MAX_TOKENS, TURNS, GONE = 18, 24, 12
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 16}


def by_token(slots: int, **graphs: Any) -> dict[str, Any]:
    return {"kv_cache": {"granularity": "token", "max_total_token_num": slots}, "graphs": graphs}


PADDED = {"mode": "eager", "recipe_check": "fail", "warm_up": "full", "max_graphs": 7}


@pytest.fixture(scope="module")
def of_blocks(tiny_llama: Path) -> Iterator[list[Answer]]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        yield engine.staggered(PROMPTS, ARRIVALS, MAX_TOKENS)


def queue_of(engine: Engine) -> FreeStrips:
    queue = engine.core.scheduler.kv_cache_manager.block_pool.free_block_queue
    assert isinstance(queue, FreeStrips)
    return queue


def check_idle(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    engine.check_idle()
    queue_of(engine).check_integrity()


def test_churn(tiny_llama: Path, of_blocks: list[Answer], tmp_path: Path) -> None:
    """Padded steps in a cache of a third of what all need, whose operators are hashed: none is new after warm-up.

    covers: A6 A7 A18
    """
    log = tmp_path / "phases.jsonl"
    with Engine(tiny_llama, {**by_token(300, **PADDED), "phase_log": str(log)}, **OPTIONS) as engine:
        limits = engine.runner.parts.static.execution.ready.buckets.limits
        assert (limits.strip, limits.blocks_per_request) == (8, 256 // 8 + 16)
        assert_same(engine.staggered(PROMPTS, ARRIVALS, MAX_TOKENS), of_blocks)
        assert engine.preemptions > 0
        abort_at_random(engine)
        serve_scattered_prefixes(engine)
        assert_same(engine.staggered(PROMPTS, ARRIVALS, MAX_TOKENS), of_blocks)
        check_idle(engine)
    header, steps = read_phase_log(log)
    assert (header["strip"], header["contiguous"]) == (8, False)
    # ranges, of which a context has more than it would have blocks
    assert max(step.bucket.unique_blocks for step in steps) > 300 // 16
    assert all(step.padded.unique_blocks >= step.bucket.unique_blocks for step in steps)
    assert all(step.padded.shared_blocks >= step.bucket.shared_blocks for step in steps)


def abort_at_random(engine: Engine) -> None:
    """Requests end in any step, while their strip is half full."""
    rng = random.Random(5)
    for number in range(GONE):
        name = f"gone-{number}"
        engine.add(name, [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 120))], greedy_params(60))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.8:
            engine.llm.llm_engine.abort_request([f"gone-{rng.randint(0, number)}"])
        queue_of(engine).check_integrity()
    engine.llm.llm_engine.abort_request([f"gone-{number}" for number in range(GONE)])


def serve_scattered_prefixes(engine: Engine) -> None:
    """A conversation of one token a turn, whose answers lie behind each: every turn's token is in a strip of its own.
    Then a request that needs most of the cache."""
    turns = [7 + number % 5 for number in range(TURNS)]
    answers = [engine.greedy([turns[:length]], 3)[0] for length in range(1, TURNS + 1)]
    # what was found is never more than there is, and mostly all but the token to compute
    found = [answer.cached_tokens for answer in answers]
    assert all(count < length for length, count in enumerate(found, 1))
    assert found[:16] == list(range(16))
    whole = [*turns, *(3 + number % 40 for number in range(190))]
    first = engine.greedy([whole], 6)[0]
    assert first.tokens == engine.greedy([whole], 6)[0].tokens


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts(tiny_llama: Path, of_blocks: list[Answer], method: str) -> None:
    """Slots of rejected drafts stay with their request. covers: A2"""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {"model": str(tiny_llama)}
    # of the draft model the default tile, of 128 slots
    size = {} if method == "ngram" else {"block_size": None}
    with Engine(tiny_llama, by_token(400, **PADDED), speculative_config=drafts, **(OPTIONS | size)) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, MAX_TOKENS), of_blocks)
        check_idle(engine)


def serve(model: str, ucm: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """In a process on the simulated card, and its counts after the start and in the end."""
    with Engine(Path(model), ucm, **options) as engine:
        from habana_frameworks.torch.simulator import card

        started = dataclasses.asdict(card)
        answers = engine.staggered(PROMPTS, ARRIVALS, MAX_TOKENS)
        check_idle(engine)
        return {
            "answers": [dataclasses.asdict(answer) for answer in answers],
            "started": started,
            "card": dataclasses.asdict(card),
            "kind": engine.runner.kind,
            "preemptions": engine.preemptions,
            "broken": broken_duties(),
            "remains": remains(),
        }


def test_compile_mode_on_the_simulated_card(tiny_llama: Path, of_blocks: list[Answer], tmp_path: Path) -> None:
    """covers: A18. Tiles with ranges in compiled regions: nothing is compiled after the start."""
    ucm = by_token(300, warm_up="skeleton", skeleton=1, max_graphs=4)
    run = run_on_card(serve, tmp_path, model=str(tiny_llama), ucm=ucm, options=OPTIONS).result
    assert run["kind"] == "compile"
    assert_same([Answer(**answer) for answer in run["answers"]], of_blocks, near_ties=0)
    assert run["preemptions"] > 0
    assert (run["broken"], run["remains"]) == ({}, [])
    for count in ("compiled_graphs", "compilations"):
        assert run["card"][count] == run["started"][count], count
