"""Sparse methods with two workers, each with half of the heads: the tokens of one worker, by the same choice."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_counts import broken_duties, count_layer_graphs
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB, make_config, make_model
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.observability.step_record import StepRecord

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(4)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (5, 60, 130, 220)]
MAX_TOKENS = 24
ON_CARD_TOKENS = 10
OPTIONS: dict[str, Any] = {
    "max_model_len": 320,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 80,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2, "sparse_ratio": 0.4}
METHODS: dict[str, dict[str, Any]] = {
    "GSA": {**WINDOWS, "dense_layers": [0], "summary": "minmax", "summary_dtype": "fp8"},
    "ESA": WINDOWS,
    "KVStar": {**WINDOWS, "checkpoint_interval": 3, "lock_duration": 9, "summary": "hash"},
}
STATIC = {"mode": "eager", "max_graphs": 8, "warm_up": "full"}
# some are cold when the first requests come
COMPILED = {"mode": "auto", "max_graphs": 5, "skeleton": 2}
# the workers compare in each step what they run
CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}


def ucm(method: str, **more: Any) -> dict[str, Any]:
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: METHODS[method]}, **more}


def compare(model: Path, folder: Path, method: str, ucm_options: dict[str, Any], **options: Any) -> list[StepRecord]:
    """Two workers beside one; returns what the first of two has logged."""
    answers, log = [], folder / "phases.jsonl"
    for workers in (1, 2):
        of_two = {"phase_log": str(log), **CHECKED} if workers == 2 else {}
        config = ucm(method, **ucm_options, **of_two)
        with Engine(model, config, **OPTIONS, **options, tensor_parallel_size=workers) as engine:
            # the second time prompts are found in the prefix cache, with their summaries
            answers.append([answer for _ in range(2) for answer in engine.greedy(PROMPTS, MAX_TOKENS)])
    assert_same(answers[1], answers[0])
    return read_phase_log(log)[1]


def test_one_kv_head_on_both_ranks(tmp_path: Path, in_process: None) -> None:
    """Query heads are shared out, a single KV head is not; true shapes, where one worker has a native call choose."""
    model = make_model(tmp_path / "model", make_config("llama", num_key_value_heads=1))
    records = compare(model, tmp_path, "ESA", {})
    assert any(record.sparse for record in records)


def test_static_shapes_and_a_dense_layer(tiny_llama: Path, tmp_path: Path) -> None:
    records = compare(tiny_llama, tmp_path, "GSA", {"graphs": STATIC})
    assert any(record.bucket.selected_blocks for record in records)


def test_locks_and_drafts(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: C17 C20. The scheduler decides on locks, and every rank compares the same choices at a checkpoint."""
    records = compare(tiny_llama, tmp_path, "KVStar", {}, speculative_config=NGRAM)
    assert any(record.sparse and record.bucket.phase[0] == "c" for record in records)


def card_counts(worker: Any) -> dict[str, Any]:
    """In a worker: compilations and graphs of its own card, how many of these are of layers, and which are warm."""
    from habana_frameworks.torch.simulator import card

    ready = worker.model_runner.static.execution.ready
    return {
        "card": [card.compilations, card.compiled_graphs, card.bypasses],
        "layers": count_layer_graphs(),
        "buckets": len(ready.buckets.forward),
        "selected": max(bucket.selected_blocks for bucket in ready.buckets.forward),
        "broken": broken_duties(),
        "warm": sorted(map(str, ready.state.warm_keys)),
        "cold": len(ready.cold),
    }


def serve(model: str) -> dict[str, Any]:
    """Answers of two cards while graphs are cold; warms the rest as the engine's loop does between requests, and
    answers again. Beside them the counts of each card. Memory mode scores all blocks, and has room for all of them."""
    scored = {"memory_mode": {"enabled": True, "on_device_ratio": 1.0, "refresh_steps": 3}}
    config = ucm("ESA", graphs=COMPILED, **CHECKED, **scored)
    with Engine(Path(model), config, **OPTIONS, tensor_parallel_size=2) as engine:
        rounds = [engine.greedy(PROMPTS, ON_CARD_TOKENS)]
        counts = {"before": engine.llm.collective_rpc(card_counts)}
        for _ in range(2000):
            if not engine.core.scheduler.has_requests():
                break
            engine.core.step()
        counts["warm"] = engine.llm.collective_rpc(card_counts)
        rounds.append(engine.greedy(PROMPTS, ON_CARD_TOKENS))
        counts["after"] = engine.llm.collective_rpc(card_counts)
        assert engine.core.scheduler.offload.totals.scored
    return {"rounds": [[dataclasses.asdict(answer) for answer in answers] for answers in rounds], **counts}


def test_two_cards_compile_nothing_once_warm(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: B1. Compiled regions hold the collectives; both workers warm the same graphs between the same two steps.
    The all-reduce of scores is a part of a layer's region, which is still one for both layers; that of the scores of
    memory mode is no part of a graph."""
    found = run_on_card(serve, tmp_path, model=str(tiny_llama)).result
    with Engine(tiny_llama, ucm("ESA"), **OPTIONS) as engine:
        for answers in found["rounds"]:
            assert_same([Answer(**answer) for answer in answers], engine.greedy(PROMPTS, ON_CARD_TOKENS))
    for moment in ("before", "warm", "after"):
        first, second = found[moment]
        assert first["warm"] == second["warm"]
        assert first["broken"] == second["broken"] == {}
    assert all(counts["cold"] > 0 for counts in found["before"])
    assert found["warm"] == found["after"]
    for counts in found["warm"]:
        assert counts["cold"] == 0
        assert counts["card"][0] > 0
        assert counts["selected"] > 0
        # before there are buckets one step is measured; layers with graphs of their own would be twice as many
        assert 0 < counts["layers"] < 2 * (counts["buckets"] + 1)
