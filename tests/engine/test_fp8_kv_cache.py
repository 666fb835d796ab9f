"""A KV cache of 8-bit floats (`--kv-cache-dtype fp8`) in an engine, beside the same engine with a cache in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.hpu_process import run_on_card
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.quantised_models import compressed_tensors, write_quantised
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((40, 3, 90, 17))]
# A decode reads its whole context from the cache; its logprob is off by this at most in a model of random weights.
NEAR = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", make_config("llama"))


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Engine]:
    with Engine(model, kv_cache_dtype="fp8", kv_cache_memory_bytes=2 << 20) as engine:
        yield engine


def assert_near(found: list[Answer], exact: list[Answer]) -> None:
    """Logprobs up to where the tokens part, which the first decode already may."""
    for one, other in zip(found, exact, strict=True):
        same = next((i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]), 8)
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=NEAR)


def test_blocks_and_answers(model: Path, narrow: Engine) -> None:
    """Four times the blocks of a float32 cache; the first layer's keys are those of that cache, rounded."""
    found = narrow.greedy(PROMPTS, 8)
    with Engine(model, kv_cache_memory_bytes=2 << 20) as wide:
        exact = wide.greedy(PROMPTS, 8)
        keys, wide_blocks = wide.cached_blocks()[0][:12].float(), wide.cached_blocks()[0].shape[0]
    assert_near(found, exact)
    blocks = narrow.cached_blocks()[0]
    assert blocks.dtype == torch.float8_e4m3fn
    assert blocks.shape[0] >= 4 * wide_blocks - 4
    # tokens of a hit are rounded, which were not when they were new
    again = narrow.greedy(PROMPTS, 8)
    assert_near(again, found)
    assert again[2].cached_tokens >= 80
    assert torch.isfinite(keys).all()


def test_buckets_agree(model: Path, narrow: Engine) -> None:
    ucm = {"graphs": {"mode": "eager", "warm_up": "skeleton", "max_graphs": 3}}
    expected = narrow.alone(PROMPTS, 8)
    with Engine(model, ucm, kv_cache_dtype="fp8", max_num_batched_tokens=64) as engine:
        assert_near(engine.greedy(PROMPTS, 8), expected)


def test_scales_of_a_checkpoint(model: Path, narrow: Engine, tmp_path: Path) -> None:
    """Powers of two change no rounding but of the smallest numbers: the answers are those of scales of 1."""
    config, choose = compressed_tensors({r".*_proj": "fp8 per channel"})
    config["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    quantised, meant = write_quantised(model, tmp_path, config, choose)
    tensors = load_file(quantised / "model.safetensors")
    for layer in range(2):
        for name, scale in (("k_scale", 0.5), ("v_scale", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with Engine(meant, kv_cache_dtype="fp8") as engine:
        expected = engine.greedy(PROMPTS, 8)
        unscaled = engine.cached_blocks()[1].float()
    with Engine(quantised) as engine:
        assert_near(engine.greedy(PROMPTS, 8), expected)
        scaled = engine.cached_blocks()[1].float()
    used = unscaled[: len(scaled)].abs().amax((1, 2, 3)) > 0
    torch.testing.assert_close(scaled[used] * 0.25, unscaled[: len(scaled)][used], atol=2.0**-9, rtol=0.07)
    assert json.loads((quantised / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]


def serve_narrow(model: str) -> list[list[float]]:
    with Engine(
        Path(model),
        {"graphs": {"warm_up": "skeleton", "max_graphs": 2}},
        kv_cache_dtype="fp8",
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 20,
    ) as engine:
        return [[answer.tokens, answer.logprobs] for answer in engine.greedy(PROMPTS[:2], 3)]


def test_on_a_card(model: Path, narrow: Engine, tmp_path: Path) -> None:
    found = run_on_card(serve_narrow, tmp_path, model=str(model)).result
    for (tokens, logprobs), other in zip(found, narrow.greedy(PROMPTS[:2], 3), strict=True):
        assert tokens[0] == other.tokens[0]
        assert logprobs[0] == pytest.approx(other.logprobs[0], abs=NEAR)


def sparse(method: str, summary: str, ratio: float, **more: object) -> dict[str, object]:
    options = {"min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2, "sparse_steps": "always"}
    chosen = {method: {**options, "summary": summary, "sparse_ratio": ratio}}
    return {"ucm_sparse_method": method, "ucm_sparse_config": chosen, **more}


LONG = [PROMPTS[0], PROMPTS[2] + PROMPTS[0] + PROMPTS[3]]


@pytest.fixture(scope="module")
def dense(model: Path) -> list[Answer]:
    with Engine(model, kv_cache_dtype="fp8", enable_prefix_caching=False) as engine:
        return engine.greedy(LONG, 12)


@pytest.mark.parametrize(("method", "summary"), [("GSA", "box_mean"), ("GSA", "hash"), ("KVStar", "minmax")])
def test_a_budget_of_all_blocks_equals_dense(model: Path, dense: list[Answer], method: str, summary: str) -> None:
    """Summaries are 8-bit floats, too, but for codes."""
    with Engine(model, sparse(method, summary, 1.0), kv_cache_dtype="fp8", enable_prefix_caching=False) as engine:
        found = engine.greedy(LONG, 12)
        selector = engine.runner.parts.sparse.selector
        summaries = selector.summaries[0]
        assert summaries.dtype == (torch.uint8 if summary == "hash" else torch.float8_e4m3fn)
        assert summaries.view(torch.uint8).count_nonzero() > 0
    for one, other in zip(found, dense, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_memory_mode(model: Path, tmp_path: Path) -> None:
    """Blocks and summaries leave as bytes and come back as they were, in files and at static shapes."""
    mode = {"enabled": True, "on_device_ratio": 0.4, "refresh_steps": 3, "history_decay": 0.0, "max_missed": 1.0}
    mode["store"] = {"kind": "file", "path": str(tmp_path / "kv"), "fsync": False}
    config = sparse("GSA", "box_mean", 0.2, memory_mode=mode, graphs={"mode": "eager", "max_graphs": 6})
    with Engine(model, config, kv_cache_dtype="fp8", max_num_batched_tokens=64, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        outputs = watched.generate([LONG[1], LONG[1][:150]], 40)
        totals = watched.offload.totals
        assert totals.released
        assert totals.loaded
        assert not totals.failed
        engine.check_idle()
    for output in outputs:
        assert all(math.isfinite(one.logprob) for entry in output.outputs[0].logprobs for one in entry.values())
