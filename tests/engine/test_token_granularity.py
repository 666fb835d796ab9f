"""`ucm.kv_cache.granularity: token`: no answer changes, nothing is rounded up, prefixes are shared to the token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB

RNG = random.Random(12)
COMMON = [RNG.randrange(3, VOCAB) for _ in range(100)]
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 150))] for _ in range(6)]
PROMPTS += [COMMON[:count] + [RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 60))] for count in (37, 61, 83, 99)]
ARRIVALS = [0, 0, 1, 2, 9, 9, 0, 3, 14, 21]


def by_token(slots: int | None = None, **sections: Any) -> dict[str, Any]:
    return {"kv_cache": {"granularity": "token", "max_total_token_num": slots}, **sections}


def held(engine: Engine) -> int:
    """Slots that requests have."""
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


@pytest.fixture(scope="module")
def of_blocks(tiny_llama: Path) -> Iterator[list[Answer]]:
    with Engine(tiny_llama) as engine:
        yield engine.staggered(PROMPTS, ARRIVALS, 40)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 24},
        {"block_size": 128},
        {"block_size": 1},
        {"block_size": None},
    ],
    ids=["tiles of 16", "no prefix cache", "chunked prefill", "tiles of 128", "tiles of 128, asked for 1", "default"],
)
def test_tokens_are_those_of_blocks_and_of_transformers(
    tiny_llama: Path, of_blocks: list[Answer], options: dict[str, Any]
) -> None:
    """covers: A1 A5 D1"""
    with Engine(tiny_llama, by_token(), **options) as engine:
        answers = engine.staggered(PROMPTS, ARRIVALS, 40)
        assert engine.runner.parts.block_size == (128 if options.get("block_size", 16) in (1, None, 128) else 16)
        for _ in range(3):
            engine.step()
        engine.check_idle()
    assert_same(answers, of_blocks)
    ReferenceModel(tiny_llama).assert_greedy(PROMPTS, answers)


@pytest.mark.parametrize("implementation", ["reference", "cpu", "native", "hpu"])
def test_every_implementation_reads_ranges(tiny_llama: Path, of_blocks: list[Answer], implementation: str) -> None:
    with Engine(tiny_llama, by_token(attention={"implementation": implementation})) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, 40), of_blocks)


def test_prefixes_are_shared_to_the_token(tiny_llama: Path) -> None:
    """A block of 16 would leave 37 % 16 tokens to compute again."""
    others = [[*COMMON[:37], 7, 8, 9], [*COMMON[:99], 5], COMMON[:90]]
    with Engine(tiny_llama, by_token()) as engine:
        engine.greedy([COMMON], 4)
        answers = engine.alone(others, 8)
        # of a prompt that is all there its last token is computed
        assert [answer.cached_tokens for answer in answers] == [37, 99, 89]
    ReferenceModel(tiny_llama).assert_greedy(others, answers)


def test_a_request_has_its_tokens_slots_and_no_more(tiny_llama: Path) -> None:
    """Blocks of 128 round each of three requests up."""
    found = {}
    for name, ucm in (("token", by_token()), ("block", {})):
        with Engine(tiny_llama, ucm, block_size=128, enable_prefix_caching=False) as engine:
            for index, length in enumerate((40, 129, 200)):
                engine.add(f"r{index}", [3 + index] * length, greedy_params(30))
            for _ in range(6):
                engine.step()
            size = engine.core.scheduler.block_size
            live = sum(request.num_computed_tokens for request in engine.core.scheduler.running)
            assert live >= 40 + 129 + 200
            found[name] = held(engine) * size - live
            engine.llm.llm_engine.abort_request([f"r{index}" for index in range(3)])
    assert found["token"] == 0
    assert found["block"] > 128


def test_the_slots_that_were_asked_for(tiny_llama: Path) -> None:
    with Engine(tiny_llama, by_token(1000), block_size=128) as engine:
        assert engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 1000
        # the dummy tile, and 1,000 slots in tiles of 128
        assert all(len(blocks) == 1 + 8 for blocks in engine.cached_blocks())
        assert engine.core.vllm_config.cache_config.kv_cache_size_tokens == pytest.approx(1000, abs=2)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preemption_and_scattered_slots(tiny_llama: Path, of_blocks: list[Answer], caching: bool) -> None:
    """A third of what all need; freed slots come back in any order. covers: A6"""
    options = {"max_model_len": 256, "max_num_batched_tokens": 48, "enable_prefix_caching": caching}
    with Engine(tiny_llama, by_token(300), **options) as engine:
        for _ in range(2):
            answers = engine.staggered(PROMPTS, ARRIVALS, 40)
            assert_same(answers, of_blocks)
        assert engine.preemptions > 0
        for _ in range(3):
            engine.step()
        engine.check_idle()


def test_exact_admission_counts_tokens(tiny_llama: Path, of_blocks: list[Answer]) -> None:
    options = {"max_model_len": 256, "max_num_batched_tokens": 48}
    with Engine(tiny_llama, by_token(300, scheduler={"admission": "exact"}), **options) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, 40), of_blocks)
        assert engine.preemptions == 0


def test_aborted_requests_leave_no_slot(tiny_llama: Path, of_blocks: list[Answer]) -> None:
    """Others take their slots at once. covers: A7"""
    with Engine(tiny_llama, by_token(400), max_model_len=256, enable_prefix_caching=False) as engine:
        for index in range(3):
            engine.add(f"gone-{index}", [9 + index] * 120, greedy_params(60))
        for _ in range(5):
            engine.step()
        engine.llm.llm_engine.abort_request([f"gone-{index}" for index in range(3)])
        assert_same(engine.staggered(PROMPTS, ARRIVALS, 40), of_blocks)
        for _ in range(3):
            engine.step()
        engine.check_idle()


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts(tiny_llama: Path, of_blocks: list[Answer], method: str) -> None:
    """Rejected drafts leave slots behind, which the next tokens take. covers: A2"""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {"model": str(tiny_llama)}
    with Engine(tiny_llama, by_token(), speculative_config=drafts) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, 40), of_blocks)
        for _ in range(3):
            engine.step()
        engine.check_idle()
