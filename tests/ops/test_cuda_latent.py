"""The kernels of layers whose values are a part of their keys. Runs as test_cuda_attention.py does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.token_steps import TokenStep, token_steps
from tests.execution.true_shape_tensors import run_step
from tests.ops.batch import Request, Shape, build, sparse_requests_strategy
from tests.ops.cuda_attention import MIXED
from tests.ops.log_sums import check_log_sums
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples
from tests.ops.padding import Pads, pad
from tests.ops.unified_attention import COMMON

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")

LATENT = Shape(heads=6, kv_heads=1, dim=40, value_dim=32, memory="in keys")


@given(requests=sparse_requests_strategy(block_size=4), heads=st.sampled_from([1, 5, 6, 32]), seed=st.integers(0, 9999))
@settings(COMMON, max_examples=examples(100))
def test_any_choice_equals_the_oracle(requests: list[Request], heads: int, seed: int) -> None:
    """covers: A1, A2, A5, A9, A10, A11, C15."""
    assert_matches(build(requests, replace(LATENT, heads=heads, seed=seed)), "cuda", prepared=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_themselves_compute_every_part(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to the reference. covers: A12"""
    from vllm_gaudi_ucm.ops.unified_attention.impl.reference import ReferenceAttention

    monkeypatch.delattr(ReferenceAttention, "attend")
    shape = replace(LATENT, heads=20, dim=72, value_dim=64, dtype=dtype)
    batch = build(MIXED, shape)
    expected = build(MIXED, replace(shape, pads=0))
    assert_matches(batch, "cuda", prepared=True)
    assert_matches(pad(expected, Pads(rows=3, unique=5, singles=9, phase="csu"), math.nan), "cuda", prepared=True)


@given(step=token_steps())
@settings(COMMON, max_examples=examples(60))
def test_the_token_table_of_any_step(step: TokenStep) -> None:
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import plan as cuda_plan

    batch = run_step(step, False, 512)
    kv = batch.key_cache[:, :, :1]
    value_dim = kv.shape[-1] - 4
    latent = replace(
        batch,
        key=batch.key[:, :1],
        value=batch.key[:, :1, :value_dim],
        key_cache=kv,
        value_cache=kv[..., :value_dim],
        spec=replace(batch.spec, values_in_keys=True),
        seen=[None if seen is None else (seen[0][:, :1], seen[0][:, :1, :value_dim]) for seen in batch.seen],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_plan, "SCATTERED", 0)
        assert_matches(latent, "cuda", prepared=True)


def test_what_a_row_sees_makes_it_nan_and_nothing_else() -> None:
    """A broken rotary element breaks its rows as a broken latent does. covers: A9"""
    requests, shape = [Request(9, 1), Request(8, 3), Request(0, 4)], replace(LATENT, pads=0)
    clean = attend(build(requests, shape), "cuda", prepared=True)
    for element in (0, 39):
        batch = build(requests, shape)
        batch.key[5, 0, element] = math.nan
        found = attend(batch, "cuda", prepared=True)
        assert found[5:8].isnan().all()
        torch.testing.assert_close(found[:4], clean[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logarithms_of_sums(dtype: torch.dtype) -> None:
    check_log_sums("cuda", dtype)
