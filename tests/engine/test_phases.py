"""The phases that the log shows are those of the traffic."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.observability.step_record import StepRecord

RNG = random.Random(6)
COMMON = [RNG.randrange(3, VOCAB) for _ in range(64)]
OWN = [[RNG.randrange(3, VOCAB) for _ in range(20)] for _ in range(6)]

Run = Callable[[list[list[int]], int], list[StepRecord]]


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path) -> Run:
    """Runs prompts that arrive together, after a round that has put COMMON into the cache, and returns the steps."""

    def steps(prompts: list[list[int]], max_tokens: int) -> list[StepRecord]:
        log = tmp_path / "phases.jsonl"
        with Engine(tiny_llama, {"phase_log": str(log)}) as engine:
            engine.greedy([COMMON], 1)
            engine.greedy(prompts, max_tokens)
        _, records = read_phase_log(log)
        assert records[0].bucket.phase == "c--"
        return records[1:]

    return steps


def phases(records: list[StepRecord]) -> list[str]:
    return [record.bucket.phase for record in records]


def test_fresh_prompts_then_decodes(run: Run) -> None:
    records = run(OWN[:3], 5)
    assert phases(records) == ["c--", "--u", "--u", "--u", "--u"]
    first, second = records[:2]
    assert first.bucket == Bucket("c--", 60, 0, 0, 3)
    assert (first.requests, first.prompts, first.tokens) == (3, 3, 60)
    assert first.causal_pairs == 3 * 20 * 21 // 2
    # 21 tokens each, their own included, in two blocks each
    assert (second.bucket.query_len, second.bucket.shared_blocks, second.bucket.logits) == (3, 0, 3)
    assert second.unique_pairs == 3 * 21


def test_a_common_prefix_is_shared_by_chunks_and_decodes(run: Run) -> None:
    records = run([COMMON + own for own in OWN[:3]], 3)
    assert phases(records) == ["cs-", "-su", "-su"]
    first, second = records[:2]
    assert first.bucket == Bucket("cs-", 60, 4, 0, 3)
    assert first.shared_pairs == 60 * 64
    assert second.shared_pairs == 3 * 64
    assert second.unique_pairs == 3 * 21


def test_a_prefix_hit_that_leaves_one_token_is_a_single_row(run: Run) -> None:
    """No causal part for a prompt tail of one token. covers: A3"""
    records = run([[*COMMON, 7]], 1)
    assert [record.bucket for record in records] == [Bucket("--u", 1, 0, len_slice(records[0]), 1)]
    assert records[0].unique_pairs == 65


def len_slice(record: StepRecord) -> int:
    """Five blocks in use; a contiguous slice may read more."""
    assert record.bucket.unique_blocks >= 5
    return record.bucket.unique_blocks


def test_decodes_beside_chunks(tiny_llama: Path, tmp_path: Path) -> None:
    """Decodes that share a prefix, while a long prompt is computed in chunks: all three parts. covers: A1"""
    log = tmp_path / "phases.jsonl"
    with Engine(tiny_llama, {"phase_log": str(log)}, max_num_batched_tokens=40) as engine:
        engine.greedy([COMMON], 1)
        prompts = [COMMON + OWN[0], COMMON + OWN[1], OWN[2] + OWN[3] + OWN[4] + OWN[5] + OWN[2]]
        engine.staggered(prompts, [0, 0, 3], 12)
        engine.check_idle()
    _, records = read_phase_log(log)
    assert {"c--", "cs-", "-su", "csu"} <= set(phases(records))
    chunks = [record for record in records if record.bucket.phase == "csu"]
    assert any(record.bucket.logits < record.requests for record in chunks), "a partial chunk yields no logits"


def test_one_record_per_step(tiny_llama: Path, tmp_path: Path) -> None:
    log = tmp_path / "phases.jsonl"
    with Engine(tiny_llama, {"phase_log": str(log)}) as engine:
        engine.add(engine.new_id(), OWN[0], greedy_params(6))
        steps = 0
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step()
            steps += 1
    header, records = read_phase_log(log)
    assert header["block_size"] == 16
    assert len(records) == steps == 6
    assert [record.step for record in records] == list(range(records[0].step, records[0].step + 6))
    assert all(record.bucket == record.padded for record in records)
    assert all(min(record.plan_ms, record.forward_ms, record.sample_ms) > 0 for record in records)
