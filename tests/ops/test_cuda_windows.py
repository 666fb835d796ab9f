"""Requests with several rows under a window, on CUDA: in one launch, and in tiles of one request. Runs where
test_cuda_attention.py runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.batch.batches import Request as Scheduled
from tests.batch.batches import lay_out
from tests.execution.bucket_tensors import Static, in_bucket, server_limits
from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.launches import launched
from tests.ops.local import Features, features, says_how_long, with_features
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples, on_gpu
from tests.ops.unified_attention import COMMON, shapes
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")

BLOCK = 16
# Verifications behind blocks of their own and of a prefix, and a single row of each kind.
VERIFIED = [
    Request(70, 4),
    Request(3 * BLOCK, 8),
    Request(90, 3, prefix=2),
    Request(50, 5, prefix=2),
    Request(61, 1, prefix=2),
    Request(83, 1),
]


def _of_layer(requests: list[Request], shape: Shape, wanted: Features) -> Batch:
    return says_how_long(with_features(build(requests, shape), wanted, shape.block_size))


@given(requests=requests_strategy(4), shape=shapes(), wanted=features())
@settings(COMMON, max_examples=examples(100))
def test_any_step_in_one_launch(requests: list[Request], shape: Shape, wanted: Features) -> None:
    """Everything outside of the windows is NaN. covers: A1, A2, A9, A19"""
    batch = _of_layer(build_for(requests, shape.block_size), shape, wanted)
    assert_matches(batch, "cuda")


def build_for(requests: list[Request], block_size: int) -> list[Request]:
    """The requests with contexts that are as many blocks long."""
    return [replace(r, cached=r.cached // 4 * block_size + r.cached % 4) for r in requests]


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(
    "wanted",
    [
        Features(BLOCK, sinks=True),
        Features(BLOCK - 3),
        Features(3),
        Features(2 * BLOCK + 1, cap=2.0, sinks=True),
        Features(200, sinks=True),
        Features(2 * BLOCK, chunked=True),
    ],
    ids=str,
)
def test_verifications(monkeypatch: pytest.MonkeyPatch, wanted: Features, one_launch: bool) -> None:
    """Windows of a block, of less, of less than the new tokens, and beyond any context. covers: A5, A9, A13"""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import windows as cuda_windows

    monkeypatch.setattr(cuda_windows, "ONE_LAUNCH_ROWS", 512 * one_launch)
    for heads, kv_heads, dim, dtype in ((4, 2, 32, torch.float32), (8, 1, 16, torch.bfloat16)):
        shape = Shape(heads, kv_heads, dim, dim, BLOCK, dtype)
        batch = _of_layer(VERIFIED, shape, wanted)
        with launched() as kernels:
            assert_matches(batch, "cuda", prepared=True)
        names = {name for name, _ in kernels}
        assert ("attend_windows" in names) == one_launch
        assert ("merge_parts" in names) != one_launch


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_breaks_the_rows_that_see_it(monkeypatch: pytest.MonkeyPatch, bad: float, one_launch: bool) -> None:
    """Of four rows of a request, the window of the last two begins behind it. covers: A9, D8"""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import windows as cuda_windows

    monkeypatch.setattr(cuda_windows, "ONE_LAUNCH_ROWS", 512 * one_launch)
    window = 2 * BLOCK + 3
    batch = _of_layer([Request(70, 4), Request(60, 3)], Shape(block_size=BLOCK, poison=1e4), Features(window))
    expected = attend(batch, "reference")
    position = 71 - window + 1  # the first that the second row sees
    batch.value_cache[batch.tables[0][position // BLOCK], position % BLOCK, 0, 3] = bad
    out = attend(batch, "cuda")
    assert out[:2, :2].isnan().all()
    expected[:2, :2] = math.nan
    torch.testing.assert_close(out, expected, equal_nan=True)


def verification_in_a_bucket(tokens: int) -> Batch:
    """Three requests of four rows in a bucket of many more rows, requests and blocks, under a window."""
    window = Window(tokens)
    step = lay_out([Scheduled(300 + 5 * i, 4) for i in range(3)], BLOCK, 0)
    limits = server_limits(step, False, 40, 7, 30, window)
    plan = plan_batch(step.batch_input(), BLOCK, window=window)
    assert plan.unique is None
    shape = ForwardShape.from_sizes(True, 50, min(80, limits.most_shared_blocks), 0, 0, ALL_TILES).step(8)
    static = Static(step, plan, shape, limits, 512, window)
    inputs = static.inputs()
    return in_bucket(static, inputs.split(static.fill(inputs), shape.forward))


@pytest.mark.parametrize(
    ("window", "filled", "expected"),
    [(32, math.inf, ["attend_windows"]), (2000, 0, ["attend_windows"]), (2000, math.inf, None)],
)
def test_launches_of_a_verification_in_a_bucket(
    monkeypatch: pytest.MonkeyPatch, window: int, filled: float, expected: list[str] | None
) -> None:
    """A layer of a short window is one launch, in a bucket of many more blocks and requests, too, and so is a long one
    where requests fill the GPU; else it is as many as without a window. Programs follow the rows, not the blocks of
    the bucket."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import windows as cuda_windows
    from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

    monkeypatch.setattr(cuda_windows, "FILLED", filled)
    batch = verification_in_a_bucket(window)
    assert_matches(batch, "cuda", prepared=True)
    if torch.cuda.is_available():
        batch = on_gpu(batch)
    cuda = ATTENTION.make("cuda")
    plan = cuda.plan(batch.parts, BLOCK)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    out = torch.full_like(batch.query, math.nan)
    # derives what all layers share
    assert cuda.attend(*tensors, plan, batch.spec, out)
    with launched() as kernels:
        assert cuda.attend(*tensors, plan, batch.spec, out)
    names = [name for name, _ in kernels]
    if expected is None:
        assert sorted(names) == ["attend_causal", "attend_shared", "attend_shared", "merge_parts", "repair_causal"]
        return
    assert names == expected
    rows, spans = batch.query.shape[0], batch.parts.shared.hi.shape[0] if batch.parts.shared else 0
    assert kernels[0][1] == (2, rows // cuda_windows.VERIFIED + min(rows, spans))
