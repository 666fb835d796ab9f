"""What only the C++ implementation promises: it needs no reference for garbage, and checks what it is given."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.ops.batch import Memory, Request, Shape, build
from tests.ops.cuda_narrow_caches import over_narrow_cache
from tests.ops.native_attention import MIXED, attend_natively
from tests.ops.oracle import assert_matches
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.impl import reference
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import native_jobs

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())


@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 36)])
def test_garbage_is_never_looked_at(
    monkeypatch: pytest.MonkeyPatch, poison: float, dtype: torch.dtype, dim: int, value_dim: int
) -> None:
    """covers: A9. The reference is not asked, so the tests of `native` are not tests of the reference."""
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))
    shape = Shape(poison=poison, dtype=dtype, dim=dim, value_dim=value_dim, contiguous=True)
    assert_matches(build(MIXED, shape), "native", prepared=True)


@pytest.mark.parametrize("memory", ["in keys", "pairs by token"])
def test_caches_of_8_bit_floats(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    """covers: A9. Latents of DeepSeek's sizes, too; on the matrix unit, if there is one, and without it."""
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))
    heads = Shape(heads=16, kv_heads=1, dim=576, value_dim=512) if memory == "in keys" else Shape(dim=64, value_dim=64)
    for requests in (MIXED, [Request(70, 1), Request(90, 40)]):
        batch = build(requests, replace(heads, dtype=torch.bfloat16, memory=memory))
        assert_matches(over_narrow_cache(batch), "native", prepared=True)


@pytest.mark.parametrize("which", ["key", "key_cache", "value", "value_cache", "query"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_seen_and_not_finite_is_reported(which: str, bad: float) -> None:
    """covers: A9, D8. Also a key of -Inf, whose weight would be 0."""
    batch = build(MIXED, Shape(poison=0.0))
    getattr(batch, which).fill_(bad)
    assert not attend_natively(batch)[0]


@pytest.mark.parametrize("row_tile", [1, 5, 64])
@pytest.mark.parametrize("token_tile", [4, 9, 1024])
def test_any_tiling_is_the_same(monkeypatch: pytest.MonkeyPatch, row_tile: int, token_tile: int) -> None:
    """covers: A13, A22. Partial results of split contexts merge."""
    monkeypatch.setattr(native_jobs, "ROW_TILE", row_tile)
    monkeypatch.setattr(native_jobs, "TOKEN_TILE", token_tile)
    assert_matches(build(MIXED, Shape()), "native")


@pytest.mark.parametrize("memory", ["dense", "pairs by head", "pairs by token"])
def test_kv_heads_in_turns_change_no_bit(memory: Memory) -> None:
    """covers: D8. How many heads of a decode take turns depends on the threads; 20 are more than can."""
    shape = Shape(heads=40, kv_heads=20, memory=memory)
    batch = build([Request(9, 1), Request(200, 1), Request(75, 2), Request(14, 5)], shape)
    assert_matches(batch, "native")
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(attend_natively(batch)[1])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


def test_cost_follows_what_is_seen() -> None:
    """covers: A13, A14, A15. Every (row, token) pair is in one job; a chunk and its own context are one job."""
    requests = [Request(40, 1), Request(12, 6), Request(0, 9)]
    jobs = native_jobs.make_jobs(build(requests, Shape(pads=3)).parts, 4)
    pairs = 0
    for row_lo, row_hi, range_lo, range_hi, first, _ in jobs.jobs.tolist():
        ranges, rows = jobs.ranges[range_lo:range_hi], jobs.rows[row_lo:row_hi, 0]
        pairs += len(rows) * int((ranges[:, 2] - ranges[:, 1]).sum())
        pairs += int((rows - first + 1).sum()) if first >= 0 else 0
    assert pairs == 41 + 6 * 12 + sum(range(1, 7)) + sum(range(1, 10))
    assert (len(jobs.jobs), jobs.partials) == (3, 0)
    assert jobs.empty_rows(19).tolist() == [16, 17, 18]


def test_jobs_of_steps_with_many_new_rows_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A13. Nothing else changes; single rows and pads do not count."""
    batch = build([Request(0, 90), Request(14, 70), *[Request(9, 1)] * 5], Shape(pads=9))
    for many, largest in ((161, 64), (160, 90)):
        monkeypatch.setattr(native_jobs, "MANY_ROWS", many)
        jobs = native_jobs.make_jobs(batch.parts, 4).jobs
        assert (jobs[:, 1] - jobs[:, 0]).max() == largest
        assert_matches(batch, "native")


def test_a_block_outside_of_the_cache_is_named() -> None:
    """covers: A10."""
    batch = build([Request(9, 1)], Shape(contiguous=True))
    ready = prepare(batch.parts, batch.key_cache.shape[1], implementation="native")
    small = batch.key_cache[:1], batch.value_cache[:1]
    with pytest.raises(IndexError, match="outside of the cache, which has 1 blocks of 4 tokens"):
        unified_attention(batch.query, batch.key, batch.value, *small, ready, batch.spec)


def test_one_plan_serves_layers_of_other_shapes() -> None:
    """Partial results and strides belong to a layer's kind, not to the plan."""
    wide, narrow = (build(MIXED, Shape(heads=heads, dim=dim, value_dim=dim)) for heads, dim in ((6, 64), (2, 16)))
    ready = prepare(wide.parts, 4, implementation="native")
    for batch in (narrow, wide, narrow):
        tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
        found = unified_attention(*tensors, ready, batch.spec)
        torch.testing.assert_close(found, unified_attention(*tensors, batch.parts, batch.spec))
