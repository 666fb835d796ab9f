"""ALiBi slopes in the CUDA kernels. Runs as test_cuda_attention.py does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.batch import Request, Shape, build, requests_strategy
from tests.ops.local import LONG, Features, with_features
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples
from tests.ops.unified_attention import COMMON, shapes
from vllm_gaudi_ucm.ops.unified_attention.impl.reference import ReferenceAttention

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")


@given(shape=shapes(), data=st.data(), cap=st.sampled_from([0.0, 2.0]), sinks=st.booleans())
@settings(COMMON, max_examples=examples(100))
def test_any_step_equals_the_oracle(shape: Shape, data: st.DataObject, cap: float, sinks: bool) -> None:
    """Everything unused is NaN or Inf. covers: A1, A2, A9"""
    requests = data.draw(requests_strategy(shape.block_size))
    assert_matches(with_features(build(requests, shape), Features(0, False, cap, sinks, True), 4), "cuda")


@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (16, torch.bfloat16), (128, torch.bfloat16)])
def test_the_kernels_themselves_compute_every_part(
    block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to the reference: of blocks shorter than a step of a loop, and longer. covers: A12"""
    monkeypatch.delattr(ReferenceAttention, "attend")
    shape = Shape(4, 4, 32, 32, block_size, dtype, memory="dense")
    long = [replace(request, cached=request.cached + request.prefix * block_size) for request in LONG]
    batch = with_features(build(long, shape), Features(slopes=True), block_size)
    # as ALiBi chooses them for four heads
    batch.per_head.slopes.copy_(torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    assert_matches(batch, "cuda", prepared=True)


def test_what_a_row_sees_makes_it_nan_and_nothing_else() -> None:
    """Distances of tokens that a row does not see reach nobody. covers: A9"""
    requests = [Request(9, 1), Request(8, 3), Request(0, 4)]
    batch = with_features(build(requests, Shape(pads=0)), Features(slopes=True), 4)
    clean = attend(batch, "cuda", prepared=True)
    batch.value[5, 0, 3] = float("nan")
    found = attend(batch, "cuda", prepared=True)
    assert found[5:8, :2].isnan().all()
    torch.testing.assert_close(found[:4], clean[:4])
