"""Tensor parallelism: workers in processes of their own, each with a part of the heads, and the tokens of one worker.

Every engine with several workers compares in each step what they run, and their logits to the last bit
(`ucm.distributed.check_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.contracts import CONTRACTS, runner_contract
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tensor_parallel import CHECKED

pytestmark = pytest.mark.slow  # starts engines with several processes

SHARED = [(7 * i) % 250 + 3 for i in range(48)]
PROMPTS = [
    [*SHARED, 5, 6, 7],
    [(11 * i) % 250 + 3 for i in range(100)],
    [*SHARED, *((3 * i) % 250 + 3 for i in range(30))],
    [9],
    [(5 * i) % 250 + 3 for i in range(70)],
]
TOKENS = 24
# Steps take at most 64 tokens, so prompts are chunked; the cache holds 20 blocks of 16 tokens: requests are preempted.
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 21, "max_model_len": 256}


@pytest.fixture(scope="module")
def one_worker(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama) as engine:
        return engine.greedy(PROMPTS, TOKENS)


@pytest.fixture(scope="module", params=CONTRACTS)
def two_workers(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with runner_contract(request.param), Engine(tiny_llama, CHECKED, tensor_parallel_size=2, **TIGHT) as engine:
        yield engine


def test_tokens_are_those_of_one_worker(two_workers: Engine, one_worker: list[Answer]) -> None:
    assert_same(two_workers.greedy(PROMPTS, TOKENS), one_worker)
    assert two_workers.preemptions > 0
    again = two_workers.greedy(PROMPTS[:1], TOKENS)
    assert_same(again, one_worker[:1])
    assert again[0].cached_tokens >= 48


def test_refused_calls_leave_no_answers_behind(two_workers: Engine, one_worker: list[Answer]) -> None:
    """An answer of a second worker would be taken for one to the next call."""
    for call in ("sleep", "profile", "reset_weights", "add_lora"):
        with pytest.raises(Exception, match=f"vllm-gaudi-ucm does not support.*{call}"):
            two_workers.llm.collective_rpc(call, args=(1,))
    assert two_workers.llm.collective_rpc("list_loras") == [set(), set()]
    assert_same(two_workers.greedy(PROMPTS[:1], TOKENS), one_worker[:1])


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
        two_workers.add(f"abort-{index}", prompt, greedy_params(TOKENS))
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
        assert_same(engine.greedy(PROMPTS, 10), [answer.first(10) for answer in one_worker])
