"""Helpers of `test_latent_attention.py` that other tests use, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.engine.families import prompts
from tests.engine.hpu_engine import HpuRun, run_on_hpu
from tests.engine.serving import Answer, assert_same

STATIC = {"graphs": {"mode": "eager", "max_graphs": 6, "recipe_check": "fail"}}


CHOICE = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}


def check_on_card(model: Path, answers: Sequence[Answer], folder: Path) -> HpuRun:
    """Compares answers of the simulated card, through torch.compile, with the first tokens of these."""
    graphs = {"warm_up": "skeleton", "skeleton": 1, "max_graphs": 4}
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "dtype": "float32"}
    run = run_on_hpu(model, folder, {"graphs": graphs}, 1, prompts(), **options)
    expected = [Answer(one.tokens[:8], one.logprobs[:8], one.gaps[:8], 0) for one in answers]
    assert_same(run.rounds[0], expected, near_ties=0)
    assert run.broken == {}
    return run
