"""Prompts whose rows choose blocks in tiles (`prompt_ratio`), in whole engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow  # starts engines

OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
SMALL = {**OPTIONS, "max_model_len": 320, "max_num_batched_tokens": 64}
PROMPTS = [
    [3 + (7 * i * i + (13 + n) * i) % (VOCAB - 3) for i in range(length)] for n, length in enumerate((400, 300, 70))
]
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 24, "warm_up": "full"}}


def ucm(ratio: float, method: str = "GSA", **more: Any) -> dict[str, Any]:
    """Decodes choose all blocks, so that they are exact."""
    options = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2, "sparse_ratio": 1.0}
    return {
        "ucm_sparse_method": method,
        "ucm_sparse_config": {method: {**options, "prompt_ratio": ratio, "prompt_tile": 32}},
        **more,
    }


def tokens(model: Path, config: dict[str, Any], **options: Any) -> list[Answer]:
    with Engine(model, config, **{**OPTIONS, **options}) as engine:
        answers = engine.greedy(PROMPTS, 16)
        engine.check_idle()
    return answers


@pytest.mark.parametrize("shapes", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("method", ["GSA", "KVStar"])
def test_all_blocks_are_dense_attention(tiny_llama: Path, method: str, shapes: dict[str, Any]) -> None:
    """And few blocks are not."""
    expected = tokens(tiny_llama, {})
    assert_same(tokens(tiny_llama, ucm(1.0, method, **shapes)), expected, near_ties=0)
    few = tokens(tiny_llama, ucm(0.1, method, **shapes))
    assert few[0].tokens != expected[0].tokens, "the case tells nothing"
    assert few[2].tokens == expected[2].tokens, "a short prompt is dense"


def test_prompts_that_are_preempted_and_computed_again(tiny_llama: Path) -> None:
    """With a cache for one of them, and drafts: the tokens of a large cache."""
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}
    expected = tokens(tiny_llama, {}, **drafts)
    with Engine(tiny_llama, ucm(1.0), **{**OPTIONS, "num_gpu_blocks_override": 46, **drafts}) as engine:
        assert_same(engine.staggered(PROMPTS, [0, 1, 2], 16), expected, near_ties=0)
        assert engine.preemptions
        engine.check_idle()


def serve(model: str, ratio: float) -> dict[str, Any]:
    """Answers on the simulated card, and what it had compiled when warm and in the end."""
    graphs = {"mode": "auto", "warm_up": "full", "max_graphs": 10}
    with Engine(Path(model), ucm(ratio, graphs=graphs), **SMALL) as engine:
        from habana_frameworks.torch.simulator import card

        warm = card.compilations, card.compiled_graphs, card.bypasses
        answers = engine.staggered(PROMPTS[1:], [0, 1], 8)
        served = card.compilations, card.compiled_graphs, card.bypasses
        prompts = engine.runner.static.execution.remainders.keys
    found = [dataclasses.asdict(answer) for answer in answers]
    return {"answers": found, "warm": warm, "served": served, "graphs": len(prompts)}


@pytest.mark.timeout(300)
def test_nothing_compiles_once_warm_on_the_simulated_card(tiny_llama: Path, tmp_path: Path) -> None:
    found = run_on_card(serve, tmp_path, model=str(tiny_llama), ratio=1.0).result
    assert found["warm"] == found["served"]
    assert found["graphs"] > 3
    with Engine(tiny_llama, {}, **SMALL) as engine:
        expected = engine.staggered(PROMPTS[1:], [0, 1], 8)
    assert_same([Answer(**answer) for answer in found["answers"]], expected)
