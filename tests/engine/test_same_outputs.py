"""However requests are batched, cut, cached, preempted and placed: each gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow  # starts engines

MAX_TOKENS = 24


def _workload() -> list[list[int]]:
    """Prompts around the block size and far beyond it, several with a common beginning of different depth."""
    rng = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    common = tokens(96)
    own = [tokens(count) for count in (1, 2, 15, 16, 17, 33, 64, 150, 300)]
    return [*own, common + tokens(5), common + tokens(40), common[:48] + tokens(30), common[:64] + tokens(1), common]


WORKLOAD = _workload()
GROWING = [*WORKLOAD[:7], *WORKLOAD[10:12]]
LONG = 90


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    """Each prompt alone, uncached, checked against Transformers."""
    with Engine(tiny_llama, enable_prefix_caching=False) as engine:
        answers = engine.alone(WORKLOAD, MAX_TOKENS)
        engine.check_idle()
    ReferenceModel(tiny_llama).assert_greedy(WORKLOAD, answers, near_ties=0)
    return answers


def test_together(tiny_llama: Path, expected: list[Answer]) -> None:
    """covers: A1 A6 A8"""
    with Engine(tiny_llama, enable_prefix_caching=False) as engine:
        assert_same(engine.greedy(WORKLOAD, MAX_TOKENS), expected)
        engine.check_idle()


# of 512, the default of these tests: above and below
@pytest.mark.parametrize("max_num_batched_tokens", [17, 100])
def test_any_chunk_size(tiny_llama: Path, expected: list[Answer], max_num_batched_tokens: int) -> None:
    """Partial chunks stand before, between and after requests that yield tokens. covers: A4 A8"""
    with Engine(tiny_llama, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16) as engine:
        assert_same(engine.greedy(WORKLOAD, MAX_TOKENS), expected)
        engine.check_idle()


@pytest.mark.parametrize("block_size", [16, 128])
def test_prefix_caching(tiny_llama: Path, expected: list[Answer], block_size: int) -> None:
    """The second round finds its prompts in the cache. covers: A3 A19"""
    with Engine(tiny_llama, block_size=block_size, enable_prefix_caching=True) as engine:
        assert_same(engine.greedy(WORKLOAD, MAX_TOKENS), expected)
        again = engine.greedy(WORKLOAD[::-1], MAX_TOKENS)[::-1]
        engine.check_idle()
    assert_same(again, expected)
    for prompt, answer in zip(WORKLOAD, again, strict=True):
        # at least the last token is computed, for its logits
        assert answer.cached_tokens == (len(prompt) - 1) // block_size * block_size


@pytest.fixture(scope="module")
def long_outputs(tiny_llama: Path) -> list[Answer]:
    """Prompts alone that grow far beyond what a small cache holds of all of them."""
    with Engine(tiny_llama, enable_prefix_caching=False) as engine:
        return engine.alone(GROWING, LONG)


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("blocks", "chunk"), [(34, 48), (50, 512)])
def test_preemption(tiny_llama: Path, long_outputs: list[Answer], caching: bool, blocks: int, chunk: int) -> None:
    """Prompt and outputs are computed again, some in several chunks, many times over. covers: A3 A6 A7"""
    with Engine(
        tiny_llama,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=chunk,
        max_num_seqs=12,
    ) as engine:
        for _ in range(2):
            assert_same(engine.greedy(GROWING, LONG), long_outputs)
            engine.check_idle()
        assert engine.preemptions >= 5


@pytest.mark.parametrize("seed", range(2))
def test_any_arrival_order(tiny_llama: Path, expected: list[Answer], seed: int) -> None:
    rng = random.Random(seed)
    order = list(range(len(WORKLOAD)))
    rng.shuffle(order)
    arrivals = [rng.randrange(30) for _ in order]
    with Engine(tiny_llama, max_num_batched_tokens=80, max_num_seqs=5) as engine:
        answers = engine.staggered([WORKLOAD[i] for i in order], arrivals, MAX_TOKENS)
        engine.check_idle()
    assert_same(answers, [expected[i] for i in order])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("contiguous_pa", [True, False, "auto"])
def test_every_way_to_read_the_cache(
    tiny_llama: Path, expected: list[Answer], implementation: str, contiguous_pa: object
) -> None:
    """covers: A19 A20"""
    ucm = {"attention": {"implementation": implementation, "contiguous_pa": contiguous_pa, "causal_slice": 16}}
    with Engine(tiny_llama, ucm, max_num_batched_tokens=100) as engine:
        for _ in range(2):
            assert_same(engine.greedy(WORKLOAD, MAX_TOKENS), expected)
        engine.check_idle()


def _churn(engine: Engine, steps: int = 60) -> None:
    """Requests of random length come, grow side by side and go, so that free blocks are in no order any more."""
    rng = random.Random(11)
    for _ in range(steps):
        if rng.random() < 0.5:
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 120))]
            engine.add(engine.new_id(), prompt, greedy_params(rng.randrange(1, 60)))
        engine.step()
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()


def _blocks_in_use(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The physical blocks that a run of the prompts gets (the run is aborted afterwards)."""
    ids = [engine.new_id() for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add(request_id, prompt, greedy_params(50))
    for _ in range(8):
        engine.step()
    table = engine.runner.parts.requests
    rows = [request.row for request in table.requests.values()]
    blocks = [table.block_tables[row, : table.num_blocks[row]].tolist() for row in rows]
    engine.llm.llm_engine.abort_request(ids, internal=False)
    engine.step()
    return blocks


def _long_prompts() -> list[list[int]]:
    rng = random.Random(4)
    common = [rng.randrange(3, VOCAB) for _ in range(320)]
    prompts = [common + [rng.randrange(3, VOCAB) for _ in range(count)] for count in (3, 70, 100)]
    return [*prompts, [rng.randrange(3, VOCAB) for _ in range(400)]]


@pytest.fixture(scope="module")
def in_order(tiny_llama: Path) -> list[Answer]:
    """Long prompts, each alone in blocks that follow each other, checked against Transformers."""
    with Engine(tiny_llama, enable_prefix_caching=False) as engine:
        answers = engine.alone(_long_prompts(), 60)
    ReferenceModel(tiny_llama).assert_greedy(_long_prompts(), answers, near_ties=0)
    return answers


@pytest.mark.parametrize("contiguous_pa", [True, False, "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_long_contexts_in_scattered_blocks(
    tiny_llama: Path, in_order: list[Answer], contiguous_pa: object, caching: bool
) -> None:
    """Prompts that need their context, in blocks spread over a used pool, shared and unique mixed. covers: A19 A20"""
    prompts = _long_prompts()
    ucm = {"attention": {"contiguous_pa": contiguous_pa}}
    with Engine(
        tiny_llama, ucm, enable_prefix_caching=caching, max_num_batched_tokens=256, num_gpu_blocks_override=140
    ) as engine:
        _churn(engine)
        tables = _blocks_in_use(engine, prompts)
        assert sum(b - a != 1 for table in tables for a, b in pairwise(table)) > 20
        for _ in range(2):
            assert_same(engine.greedy(prompts, 60), in_order)
        engine.check_idle()
