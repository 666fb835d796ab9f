"""Prompts whose rows choose blocks in tiles (`prompt_ratio`), in whole engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow  # starts engines

OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PROMPTS = [[3 + (7 * i * i + (13 + n) * i) % (VOCAB - 3) for i in range(length)] for n, length in enumerate((400, 300, 70))]
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
