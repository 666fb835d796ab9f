"""Sparse methods in models whose layers see differently far back: those that see whole contexts choose.

Every block holds NaN until a request writes it; windows give back what no row will see.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.kv_groups import OPTIONS, held_at_the_end, prompts
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import make_model
from tests.engine.window_models import window_config
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.sparse.selection.layer_selector import ChoosingLayer, DenseLayer
from vllm_gaudi_ucm.start.sparse_setup import summaries_per_block

pytestmark = pytest.mark.slow  # starts engines

FULL_LAYERS = {"gemma2": [1, 3], "gemma3_text": [2], "gpt_oss": [1], "llama4_text": [3]}
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


def ucm(ratio: float, method: str = "GSA", mode: str = "off", **more: Any) -> dict[str, Any]:
    chosen = {method: {**WINDOWS, "sparse_ratio": ratio, **more}}
    return {"ucm_sparse_method": method, "ucm_sparse_config": chosen, "graphs": {"mode": mode, "max_graphs": 8}}


# where layers of whole contexts have a low budget: two families are enough
LOW_BUDGETS = ["gemma3_text", "gpt_oss"]


@pytest.fixture(scope="module", params=FULL_LAYERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(request.param))


def poisoned(model: Path, config: dict[str, Any], **options: Any) -> Engine:
    engine = Engine(model, config, **{**OPTIONS, **options})
    engine.poison()
    return engine


@pytest.fixture(scope="module")
def dense(model: Path) -> list[Answer]:
    with Engine(model, **OPTIONS) as engine:
        return engine.greedy(prompts(), 32)


def test_a_budget_of_all_blocks_equals_dense(model: Path, dense: list[Answer]) -> None:
    """covers: C13 C16. Chunks, prefix hits and decodes; sinks, caps and windows are as without a method."""
    method, mode = ("KVStar", "eager") if model.name in ("gemma2", "gpt_oss") else ("GSA", "off")
    with poisoned(model, ucm(1.0, method, mode)) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        found = [engine.greedy(prompts(), 32) for _ in range(2)]
        sparse = engine.runner.parts.sparse
        assert sparse is not None
        layers = [layer for layer in sparse.selector.layers if isinstance(layer, ChoosingLayer)]
        assert [layer._layer_idx for layer in layers] == FULL_LAYERS[model.name]
        assert len(sparse.selector.summaries) == len(layers)
        assert sum(sparse.state.totals.modes.values()) > 0
        engine.check_idle()
        *windows, whole = held_at_the_end(engine, prompts()[1])
        assert whole == 14
        assert max(windows) <= 3
        engine.check_idle()
    for answers in found:
        assert_same(answers, dense)


@pytest.mark.parametrize("model", LOW_BUDGETS[:1], indirect=True)
def test_sparse_prompts_are_refused_by_name(model: Path) -> None:
    with pytest.raises(
        UnsupportedFeatureError, match=r"with windows \(leave prompt_ratio out.*asked for by prompt_ratio"
    ):
        Engine(model, ucm(0.3, prompt_ratio=0.3), **OPTIONS).__enter__()


@pytest.mark.parametrize("model", LOW_BUDGETS, indirect=True)
def test_a_low_budget(model: Path, dense: list[Answer]) -> None:
    """The first token of a decode is that of the prompt, which is dense; later ones are off, and are numbers. What
    layers with windows attend to is not less: where the others are dense, nothing changes."""
    with poisoned(model, ucm(0.1)) as engine:
        found = engine.greedy(prompts(), 32)
        totals = engine.runner.parts.sparse.state.totals
        assert totals.attended_blocks < totals.context_blocks
    with poisoned(model, ucm(0.1), disable_hybrid_kv_cache_manager=True) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 1
        assert_same(engine.greedy(prompts(), 32), found)
    assert [answer.logprobs[0] for answer in found] == pytest.approx([answer.logprobs[0] for answer in dense], abs=1e-4)
    assert all(math.isfinite(one) for answer in found for one in answer.logprobs)
    assert any(one.logprobs != pytest.approx(other.logprobs, abs=1e-5) for one, other in zip(found, dense, strict=True))
    with Engine(model, ucm(0.1, dense_layers=FULL_LAYERS[model.name]), **OPTIONS) as engine:
        assert all(isinstance(layer, DenseLayer) for layer in engine.runner.parts.sparse.selector.layers)
        assert_same(engine.greedy(prompts(), 32), dense)


def test_more_whole_contexts_than_windows(tmp_path: Path) -> None:
    """vLLM would make several groups of the layers that choose: one table is kept, and nothing else changes."""
    kinds = ["sliding_attention", *["full_attention"] * 3]
    folder = make_model(tmp_path, window_config("gemma3_text", num_hidden_layers=4, layer_types=kinds))
    with Engine(folder, **OPTIONS) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 4
        expected = engine.greedy(prompts(), 32)
    with poisoned(folder, ucm(1.0)) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 1
        assert_same(engine.greedy(prompts(), 32), expected)


@pytest.mark.parametrize("one_table", [False, True])
@pytest.mark.parametrize("summary", ["minmax", "minmax fp8", "hash"])
@pytest.mark.parametrize("model", ["gemma2", "gemma3_text"], indirect=True)
def test_memory_that_is_kept_for_summaries(model: Path, summary: str, one_table: bool) -> None:
    """What is taken, to the byte: layers with windows have none."""
    kind, _, dtype = summary.partition(" ")
    chosen = ucm(0.3, summary=kind, summary_dtype=dtype or "auto")
    with Engine(model, chosen, **OPTIONS, disable_hybrid_kv_cache_manager=one_table or None) as engine:
        runner, config = engine.runner, engine.llm.llm_engine.vllm_config
        specs, blocks = runner.get_kv_cache_spec(), engine.core.scheduler.kv_cache_config.num_blocks
        taken = sum(one.nbytes for one in runner.parts.sparse.selector.summaries)
        page = next(iter(specs.values())).page_size_bytes
        groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
        assert (len(groups) == 1) == one_table
        cache = blocks * page * max(len(group.layer_names) for group in groups)
        assert summaries_per_block(resolve_config({"ucm": chosen}), config, specs) == pytest.approx(taken / cache)
