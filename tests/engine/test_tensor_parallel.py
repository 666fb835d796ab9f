"""Tensor parallelism: workers in processes of their own, each with a part of the heads, and the tokens of one worker.

Every engine with several workers compares in each step what they run, and their logits to the last bit
(`ucm.distributed.check_ranks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same, greedy_params

pytestmark = pytest.mark.slow  # starts engines with several processes

CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}
SHARED = [(7 * i) % 250 + 3 for i in range(48)]
PROMPTS = [
    [*SHARED, 5, 6, 7],
    [(11 * i) % 250 + 3 for i in range(100)],
    [*SHARED, *((3 * i) % 250 + 3 for i in range(30))],
    [9],
    [(5 * i) % 250 + 3 for i in range(70)],
]
# Steps take at most 64 tokens, so prompts are chunked; the cache holds 20 blocks of 16 tokens: requests are preempted.
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 21, "max_model_len": 256}


@pytest.fixture(scope="module")
def one_worker(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama) as engine:
        return engine.greedy(PROMPTS, 40)


@pytest.fixture(scope="module")
def two_workers(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, CHECKED, tensor_parallel_size=2, **TIGHT) as engine:
        yield engine


def test_tokens_are_those_of_one_worker(two_workers: Engine, one_worker: list[Answer]) -> None:
    assert_same(two_workers.greedy(PROMPTS, 40), one_worker)
    assert two_workers.preemptions > 0
    again = two_workers.greedy(PROMPTS[:1], 40)
    assert_same(again, one_worker[:1])
    assert again[0].cached_tokens >= 48


def test_random_sampling_agrees(two_workers: Engine) -> None:
    """Each worker samples; one that drew otherwise would end the engine."""
    drawn = two_workers.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=12, n=2, top_p=0.9))
    assert all(len(output.outputs) == 2 for output in drawn)
    seeded = SamplingParams(temperature=1.0, max_tokens=12, seed=11)
    first, second = (two_workers.generate(PROMPTS[:2], seeded) for _ in range(2))
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]


def test_aborts(two_workers: Engine, one_worker: list[Answer]) -> None:
    core = two_workers.llm.llm_engine
    for index, prompt in enumerate(PROMPTS):
        two_workers.add(f"abort-{index}", prompt, greedy_params(40))
    finished: dict[str, Any] = {}
    for step in range(200):
        if step == 4:
            core.abort_request(["abort-0", "abort-2"])
        finished.update((output.request_id, output) for output in core.step() if output.finished)
        if not core.has_unfinished_requests():
            break
    assert finished.keys() == {"abort-1", "abort-3", "abort-4"}
    for index in (1, 3, 4):
        assert list(finished[f"abort-{index}"].outputs[0].token_ids) == one_worker[index].tokens


def test_more_workers_than_kv_heads(tiny_llama: Path, one_worker: list[Answer]) -> None:
    """Two KV heads, four workers: each head is kept twice. With drafts of n-grams."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with Engine(tiny_llama, CHECKED, tensor_parallel_size=4, speculative_config=drafts) as engine:
        assert_same(engine.greedy(PROMPTS, 40), one_worker)


def test_real_text_on_three_workers(smollm2: Path, smol_engine: Engine) -> None:
    """The demo model has 9 heads and 3 KV heads; with a grammar, and with its own self as the draft model."""
    prompts = ["The capital of France is", "Once upon a time, there was a"]
    numbers = SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{3}-[0-9]{4}")
    )
    expected = smol_engine.greedy(prompts, 16), [o.outputs[0].text for o in smol_engine.generate(prompts, numbers)]
    options: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "speculative_config": {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 2},
    }
    with Engine(smollm2, CHECKED, tensor_parallel_size=3, **options) as engine:
        assert_same(engine.greedy(prompts, 16), expected[0])
        assert [output.outputs[0].text for output in engine.generate(prompts, numbers)] == expected[1]


def card_counts(worker: Any) -> dict[str, Any]:
    """In a worker: what its card has counted, duties that were broken, and graphs that are warm and cold."""
    from habana_frameworks.torch.simulator import card

    from tests.engine.hpu_counts import broken_duties

    ready = worker.model_runner.static.execution.ready
    return {
        "compiled": card.compilations,
        "broken": broken_duties(),
        "warm": sorted(map(str, ready.state.warm_keys)),
        "cold": len(ready.cold),
    }


def serve_on_cards(model: str) -> dict[str, Any]:
    """Answers while graphs are cold, warms the rest as the engine's loop does between requests, and answers again."""
    ucm = {**CHECKED, "graphs": {"max_graphs": 8, "skeleton": 2}}
    with Engine(Path(model), ucm, tensor_parallel_size=2, max_num_batched_tokens=64, max_model_len=256) as engine:
        cold = engine.greedy(PROMPTS, 10)
        before = engine.llm.collective_rpc(card_counts)
        for _ in range(2000):
            if not engine.core.scheduler.has_requests():
                break
            engine.core.step()
        warm = engine.llm.collective_rpc(card_counts)
        again = engine.greedy(PROMPTS, 10)
        after = engine.llm.collective_rpc(card_counts)
    answers = [[dataclasses.asdict(answer) for answer in answers] for answers in (cold, again)]
    return {"answers": answers, "before": before, "warm": warm, "after": after}


def test_two_simulated_cards(tiny_llama: Path, tmp_path: Path, one_worker: list[Answer]) -> None:
    """Compiled regions hold the collectives; both workers warm the same graphs between the same two steps."""
    found = run_on_card(serve_on_cards, tmp_path, model=str(tiny_llama)).result
    for answers in found["answers"]:
        expected = [dataclasses.replace(one, tokens=one.tokens[:10]) for one in one_worker]
        assert [answer["tokens"] for answer in answers] == [one.tokens for one in expected]
    for moment in ("before", "warm", "after"):
        first, second = found[moment]
        assert first["warm"] == second["warm"]
        assert first["broken"] == second["broken"] == {}
    assert found["before"][0]["cold"] > 0
    assert all(card["cold"] == 0 for card in found["warm"])
    assert [card["compiled"] for card in found["after"]] == [card["compiled"] for card in found["warm"]]
