"""Unified Attention against a float64 oracle over generated batches, for every implementation."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches, attend, examples
from tests.ops.unified_attention import COMMON, MIXED, shapes
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec


@given(requests=requests_strategy(block_size=4), shape=shapes())
@settings(COMMON, max_examples=examples(150))
def test_any_batch_equals_the_oracle(requests: list[Request], shape: Shape) -> None:
    """covers: A1, A2, A5, A9, A10, A11, A19. Everything unused, and the dummy block and pads, is NaN or Inf."""
    assert_matches(build(requests, shape), *IMPLEMENTATIONS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (9, 3, 64), (4, 1, 64)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_dtypes_heads_and_forms(
    implementation: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, contiguous: bool
) -> None:
    """covers: A12. Low precision inputs stay within twice the error of a plain softmax in that precision."""
    shape = Shape(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim, dtype=dtype, contiguous=contiguous)
    assert_matches(build(MIXED, shape), implementation, prepared=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_value_heads_of_another_size(implementation: str) -> None:
    assert_matches(build(MIXED, Shape(value_dim=24)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_block_sizes(implementation: str, block_size: int) -> None:
    scaled = [Request(r.cached + r.prefix * block_size, r.new, r.prefix, r.family) for r in MIXED]
    assert_matches(build(scaled, Shape(block_size=block_size)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("loose", [False, True])
def test_long_context_in_scattered_blocks(implementation: str, loose: bool) -> None:
    """covers: A14, A19, A22. Longer than one tile of every implementation, decode and chunk, merged from pieces."""
    requests = [Request(5000, 1, prefix=2), Request(4100, 1, prefix=3), Request(4999, 6, prefix=3), Request(17000, 1)]
    shape = Shape(heads=2, kv_heads=1, block_size=16, loose=loose)
    assert_matches(build(requests, shape), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_of_extreme_size(implementation: str) -> None:
    """covers: A12, A22. Parts whose maxima differ by hundreds merge without overflow."""
    batch = build(MIXED, Shape())
    batch.query *= 100
    assert_matches(batch, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp16_whose_scores_overflow_fp16(implementation: str) -> None:
    """covers: A12. Scores beyond 65504 are ordinary numbers in fp32."""
    batch = build(MIXED, Shape(dtype=torch.float16, poison=0.0))
    batch.query *= 200
    wide = build(MIXED, Shape(poison=0.0))
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        getattr(wide, name).copy_(getattr(batch, name))
    batch.spec = wide.spec = AttentionSpec(1000.0)
    expected = attend(wide, "reference")
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(attend(batch, implementation).float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_order_of_requests_does_not_matter(implementation: str) -> None:
    """covers: A8. Each request's rows are what they are when the batch is laid out in another order."""
    plain = build(MIXED, Shape(seed=3))
    for trial in range(3):
        order = list(range(len(plain.requests)))
        random.Random(trial).shuffle(order)
        order.sort(key=lambda index: plain.requests[index].new != 1)
        rows = [
            row
            for index in order
            for row in range(plain.first_row[index], plain.first_row[index] + plain.requests[index].new)
        ]
        moved = build([plain.requests[index] for index in order], Shape(seed=3))
        rows += range(len(rows), plain.query.shape[0])
        for name in ("query", "key", "value"):
            getattr(moved, name).copy_(getattr(plain, name)[rows])
        _copy_contexts(plain, moved, order)
        torch.testing.assert_close(attend(moved, implementation), attend(plain, implementation)[rows])


def _copy_contexts(plain: Batch, moved: Batch, order: list[int]) -> None:
    """Moves what each request has in the cache to where the other layout keeps it."""
    for place, index in enumerate(order):
        for source, target in zip(plain.tables[index], moved.tables[place], strict=True):
            for name in ("key_cache", "value_cache"):
                getattr(moved, name)[target] = getattr(plain, name)[source]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_without_rows_or_parts(implementation: str) -> None:
    assert attend(build([], Shape(pads=0)), implementation).shape == (0, 4, 16)
    assert not attend(build([], Shape(pads=3)), implementation).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_a_part_of_keys(implementation: str, dtype: torch.dtype) -> None:
    """Multi-head latent attention: one KV head for all, whose keys are longer than its values."""
    shape = Shape(heads=6, kv_heads=1, dim=40, value_dim=32, dtype=dtype, memory="in keys")
    assert_matches(build(MIXED, shape), implementation, prepared=True)
