"""Summaries of 8-bit floats (`summary_dtype: fp8`) beside a cache of float32, in engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.hpu_process import run_on_card
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.ops.block_selection.api import write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.sparse.selection import layer_selector
from vllm_gaudi_ucm.start.sparse_setup import summaries_per_block

pytestmark = pytest.mark.slow  # starts engines

SHORT, LONG = ([(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 150)))
PROMPTS = [SHORT, LONG]
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


def ucm(method: str = "GSA", ratio: float = 1.0, dtype: str = "fp8", **options: Any) -> dict[str, Any]:
    section = {**WINDOWS, "sparse_ratio": ratio, "summary_dtype": dtype, **options}
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: section}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", make_config("llama"))


@pytest.fixture(scope="module")
def dense(model: Path) -> list[Answer]:
    with Engine(model, enable_prefix_caching=False) as engine:
        return engine.greedy(PROMPTS, 12)


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("GSA", {}),
        ("ESA", {"summary": "mean"}),
        ("KVStar", {"base_method": "ESA", "summary": "minmax"}),
        ("GSA", {"implementation": "reference"}),
    ],
)
def test_a_budget_of_all_blocks_equals_dense(
    model: Path, dense: list[Answer], method: str, options: dict[str, Any]
) -> None:
    """The cache stays what it is, and memory for summaries is what is set aside for them, to the byte."""
    chosen = ucm(method, **options)
    with Engine(model, chosen, enable_prefix_caching=False) as engine:
        assert_same(engine.greedy(PROMPTS, 12), dense)
        runner, config = engine.runner, engine.llm.llm_engine.vllm_config
        selector, specs = runner.parts.sparse.selector, runner.get_kv_cache_spec()
        assert all(one.dtype == E4M3 and one.view(torch.uint8).any() for one in selector.summaries)
        assert engine.cached_blocks()[0].dtype == torch.float32
        assert sum(runner.parts.sparse.state.totals.modes.values()) > 0
        taken = sum(one.nbytes for one in selector.summaries)
        cache = selector.summaries[0].shape[0] * sum(spec.page_size_bytes for spec in specs.values())
        assert summaries_per_block(resolve_config({"ucm": chosen}), config, specs) == pytest.approx(taken / cache)


@pytest.mark.parametrize("summary", ["box_mean", "minmax"])
def test_choices_are_those_of_rounded_summaries(model: Path, summary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a low budget: of an engine whose float32 summaries are rounded by hand, at true shapes and in buckets."""
    found = []
    for more in ({}, {"graphs": {"mode": "eager", "max_graphs": 6}}):
        with Engine(model, {**ucm(ratio=0.3, summary=summary), **more}, max_num_batched_tokens=64) as engine:
            found.append(engine.greedy(PROMPTS, 24))
            totals = engine.runner.parts.sparse.state.totals
            assert totals.attended_blocks < totals.context_blocks
    assert_same(found[1], found[0])

    def write_rounded(keys: torch.Tensor, blocks: torch.Tensor, summaries: torch.Tensor, kind: SummaryKind) -> None:
        write_summaries(keys, blocks, summaries, kind)
        summaries[blocks] = summaries[blocks].to(E4M3).float()

    monkeypatch.setattr(layer_selector, "write_summaries", write_rounded)
    with Engine(model, ucm(ratio=0.3, dtype="auto", summary=summary), max_num_batched_tokens=64) as engine:
        assert_same(engine.greedy(PROMPTS, 24), found[0])
        assert engine.runner.parts.sparse.selector.summaries[0].dtype == torch.float32


def test_memory_mode(model: Path, tmp_path: Path) -> None:
    """Summaries of blocks that leave stay as bytes, and score what is away."""
    mode = {"enabled": True, "on_device_ratio": 0.4, "refresh_steps": 3, "history_decay": 0.0, "max_missed": 1.0}
    mode["store"] = {"kind": "file", "path": str(tmp_path / "kv"), "fsync": False}
    config = {**ucm(ratio=0.2), "memory_mode": mode, "graphs": {"mode": "eager", "max_graphs": 6}}
    with Engine(model, config, max_num_batched_tokens=64, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        outputs = watched.generate([LONG, LONG[:140]], 40)
        totals = watched.offload.totals
        assert totals.released
        assert totals.loaded
        assert not totals.failed
        assert all(one.dtype == E4M3 for one in engine.runner.parts.sparse.selector.scorer.offloaded)
        engine.check_idle()
    for output in outputs:
        assert all(math.isfinite(one.logprob) for entry in output.outputs[0].logprobs for one in entry.values())


def serve(model: str) -> list[list[float]]:
    config = {**ucm(), "graphs": {"warm_up": "skeleton", "max_graphs": 2}}
    with Engine(Path(model), config, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20) as engine:
        found = [[answer.tokens, answer.logprobs] for answer in engine.greedy([LONG], 4)]
        assert engine.runner.parts.sparse.selector.summaries[0].dtype == E4M3
        return found


def test_on_a_card(model: Path, dense: list[Answer], tmp_path: Path) -> None:
    ((tokens, logprobs),) = run_on_card(serve, tmp_path, model=str(model)).result
    assert tokens == dense[1].tokens[:4]
    assert logprobs == pytest.approx(dense[1].logprobs[:4], abs=1e-3)
