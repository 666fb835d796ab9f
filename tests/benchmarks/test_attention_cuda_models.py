"""The table of other models' attention on a GPU: its exact rows, its limits, and what it says of what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.attention_cuda import relative_error
from benchmarks.attention_cuda_case import Case, Request, make_batch
from benchmarks.attention_cuda_models import CONTEXTS, MODELS, beyond_windows, cases, slower
from benchmarks.attention_cuda_result import OURS, Result
from benchmarks.attention_cuda_rows import BUCKET, WINDOW_VARIANTS, Variant, in_bucket, planned, window_sides
from benchmarks.attention_cuda_sides import ours
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart


@pytest.mark.parametrize("name", MODELS)
def test_exact_rows_are_those_of_the_reference(name: str) -> None:
    """Contexts beyond the window, which ends within a block; decodes and requests of several rows."""
    small = MODELS[name]
    small = replace(small, heads=2 * small.kv_heads, window=small.window // 8, block_size=16, dtype=torch.float32)
    requests = (Request(599, 1), Request(70, 1), Request(300, 5), Request(0, 40))
    plain = make_batch(Case("", requests, 0.0), small, torch.device("cpu"))
    for batch in (planned(plain), in_bucket(plain)):
        side = ours(batch, "reference")
        side.written().fill_(float("nan"))
        side.run()
        assert relative_error(batch, side.rows()) < 1e-5
    causal = batch.parts.causal
    assert isinstance(causal, CausalPart)
    assert (causal.first_rows is not None) == bool(small.window or small.slopes)


def test_limits_count_what_a_window_shows() -> None:
    """One decode: the keys and values of 128 tokens, its query and its result."""
    model, device = MODELS["gpt-oss, window 128"], torch.device("cpu")
    long, short = (make_batch(Case("", (Request(tokens - 1, 1),), 0.0), model, device) for tokens in (4096, 128))
    assert long.bytes == short.bytes == 2 * 2 * 64 * (128 * 8 + 64)
    assert long.flops == short.flops == 4 * 128 * 64 * 64
    assert len(long.caches[0]) <= 3


def test_no_case_needs_more_than_its_memory() -> None:
    names = {name: [case.name for case in cases(model)] for name, model in MODELS.items()}
    assert "64 at 131072" in names["gpt-oss"]
    assert "64 at 131072" not in names["Gemma 2"]
    assert "prompt of 2048" not in names["DeepSeek-V3"]


def test_every_variant_of_windows_chooses_something_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has a name of its own."""
    pytest.importorskip("triton")
    from benchmarks import attention_cuda_rows as rows
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import windows as cuda_windows

    causal_tile = cuda_parts.causal_tile
    before = {name: getattr(cuda_windows, name) for variant in WINDOW_VARIANTS for name in variant.windows}
    chosen = []

    def run_as(batch: None, variant: Variant) -> None:
        with rows._chosen(variant):
            now = {name: getattr(cuda_windows, name) for name in before}
            assert (now != before) == bool(variant.windows)
            assert (cuda_parts.causal_tile is not causal_tile) == bool(variant.causal)
            chosen.append(variant)

    monkeypatch.setattr(rows, "ours_as", run_as)
    monkeypatch.setattr(rows, "sides", lambda batch: {BUCKET: None})
    assert len(window_sides(None)) == 1 + len(WINDOW_VARIANTS)  # type: ignore[arg-type]
    assert chosen == list(WINDOW_VARIANTS)
    assert {name: getattr(cuda_windows, name) for name in before} == before


def test_the_verdict() -> None:
    """The better of the peer's kernels counts; a window is compared with a context that it just covers."""
    name = "gpt-oss, window 128"

    def result(case: str, own: float, peers: dict[str, float]) -> Result:
        return Result(f"{name}: {case}", 0.0, 0.0, 0.0, {OURS: own, **peers})

    results = [
        result("16 at 128", 1.0, {"triton 2d": 0.5, "triton 3d": 2.0, BUCKET: 0.1}),
        result(f"16 at {CONTEXTS[-1]}", 1.1, {"triton 2d": 2.0}),
        result("1 at 128", 1.0, {}),
    ]
    assert slower(results) == [f"{name}: 16 at 128 (0.50x)"]
    assert beyond_windows(results) == [f"{name}: 16 at 131072 takes 1.10 of 128"]
