"""Attention on the CPU's matrix unit: the same promises as the kernel of fp32 instructions, and a smaller error."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.local import Features, with_features
from tests.ops.native_attention import attend_natively
from tests.ops.native_attention_pairs import BRAIN, check
from tests.ops.oracle import assert_matches, examples, oracle
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.unified_attention.impl import reference
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import native_jobs

pytestmark = pytest.mark.skipif(not matrix_unit.available(), reason=matrix_unit.why_not())

WIDE = Shape(heads=6, kv_heads=2, dim=128, value_dim=128)
MIXED = [
    Request(9, 1, prefix=2),
    Request(37, 11, prefix=2),
    Request(140, 16, prefix=3),
    Request(5, 3, family=1, prefix=1),
    Request(0, 90),
    Request(75, 43),
]


def both_ways(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What the matrix unit makes of a batch, and what fp32 instructions do."""
    found = []
    for wanted in (True, False):
        with matrix_unit.using(wanted):
            finite, out = attend_natively(batch)
            assert finite
            found.append(out)
    return found[0], found[1]


def distance(batch: Batch, out: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(out.double().numpy() - expected) / np.linalg.norm(expected))


def test_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances count in every row of a block, also where it sees a whole tile."""
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))
    batch = with_features(build(MIXED, WIDE), Features(slopes=True, sinks=True), WIDE.block_size)
    assert_matches(batch, "native", prepared=True)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 192), (160, 96)])
def test_garbage_is_never_looked_at(
    monkeypatch: pytest.MonkeyPatch, poison: float, dtype: torch.dtype, dim: int, value_dim: int
) -> None:
    """covers: A9. Every kind of cache, in any of which keys and values split into another number of parts."""
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))
    shape = replace(WIDE, poison=poison, dtype=dtype, dim=dim, value_dim=value_dim, contiguous=True)
    assert_matches(build(MIXED, shape), "native", prepared=True)


@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(
        st.builds(
            lambda prefix, own, new: Request(16 * prefix + own, new, prefix),
            st.integers(0, 3),
            st.integers(0, 90),
            st.one_of(st.just(1), st.integers(10, 70)),
        ),
        min_size=1,
        max_size=5,
    ),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([128, 192]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_any_batch(requests: list[Request], kv_heads: int, group: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    """covers: A1, A13, A22. Any number of query vectors, tokens and requests, with whatever does not fill a tile."""
    shape = Shape(kv_heads * group, kv_heads, dim, dim, block_size=16, dtype=dtype, seed=seed)
    assert_matches(build(requests, shape), "native")


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (96, 32)])
@pytest.mark.parametrize("factor", [1, 16])
def test_weights_of_bfloat16_are_rounded_to_it(dim: int, value_dim: int, factor: int) -> None:
    """covers: A9, A13. Scales that bfloat16 holds and others, large scores, rows that see a part of a tile."""
    batch = build([*MIXED, Request(200, 33)], replace(BRAIN, dim=dim, value_dim=value_dim))
    batch.query.mul_(factor)
    finite, out = attend_natively(batch)
    assert finite
    check(batch, out)


def test_rounded_weights_of_equal_values_leave_that_value() -> None:
    """They are shares of their own sum, in any tile and in merged results."""
    batch = build([*MIXED, Request(300, 70)], BRAIN)
    value = torch.tensor(1.6640625, dtype=torch.bfloat16)
    batch.value.fill_(value)
    batch.value_cache.fill_(value)
    batch.query.mul_(8)
    finite, out = attend_natively(batch)
    assert finite
    rows = [row for row, seen in enumerate(batch.seen) if seen is not None]
    assert (out[rows] == value).all()


@pytest.mark.parametrize("row_tile", [8, 33, 64])
@pytest.mark.parametrize("token_tile", [9, 100, 1024])
def test_any_tiling_is_the_same(monkeypatch: pytest.MonkeyPatch, row_tile: int, token_tile: int) -> None:
    """covers: A13, A22."""
    monkeypatch.setattr(native_jobs, "ROW_TILE", row_tile)
    monkeypatch.setattr(native_jobs, "TOKEN_TILE", token_tile)
    assert_matches(build(MIXED, WIDE), "native")


@pytest.mark.parametrize("which", ["key", "key_cache", "value", "value_cache", "query"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_seen_and_not_finite_is_reported(which: str, bad: float, dtype: torch.dtype) -> None:
    """covers: A9, D8. One number is enough, whatever it is split into; without the unit the answer is the same."""
    batch = build([Request(75, 43)], replace(WIDE, dtype=dtype, poison=0.0, block_size=16))
    tensor = getattr(batch, which)
    if which.endswith("cache"):
        tensor[batch.tables[0][2], 5, 1, 77] = bad
    else:
        tensor[20, -1, 77] = bad
    for wanted in (True, False):
        with matrix_unit.using(wanted):
            assert not attend_natively(batch)[0]


@pytest.mark.parametrize("bits", [0x7FFF, 0xFFFF, 0x7FC0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_nan_of_half_precision_is_seen(bits: int, dtype: torch.dtype) -> None:
    """covers: A9. Rounding must not carry a NaN whose bits are all set into its sign."""
    batch = build([Request(75, 43)], replace(WIDE, dtype=dtype, poison=0.0, block_size=16))
    bad = torch.tensor(bits, dtype=torch.uint16).view(torch.int16).view(dtype)
    assert bad.isnan()
    batch.key_cache[batch.tables[0][2], 5, 1, 77] = bad
    assert not attend_natively(batch)[0]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_error_is_not_larger_than_that_of_fp32_instructions(scale: float) -> None:
    """Both ways against float64, with flat and with sharp weights; and they are two ways."""
    batch = build([Request(0, 90), Request(300, 70)], replace(WIDE, block_size=16, seed=3))
    batch.query *= scale
    expected = oracle(batch)
    tiles, plain = both_ways(batch)
    assert not torch.equal(tiles, plain)
    assert distance(batch, tiles, expected) <= distance(batch, plain, expected) < 2e-6


def test_repeats_are_equal_to_the_bit() -> None:
    """covers: D8."""
    batch = build(MIXED, WIDE)
    first = attend_natively(batch)[1]
    for _ in range(3):
        torch.testing.assert_close(attend_natively(batch)[1], first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rising", [True, False])
def test_a_maximum_that_rises_or_falls_by_far(rising: bool) -> None:
    """Scores from -150 to 150: results so far are scaled anew in every tile, or all later weights vanish."""
    batch = build([Request(300, 40)], replace(WIDE, block_size=16))
    keys = torch.linspace(-150, 150, 300) if rising else torch.linspace(150, -150, 300)
    batch.query[:] = 0.0
    batch.query[..., 0] = 1 / batch.spec.scale
    for position, score in enumerate(keys):
        block = batch.tables[0][position // 16]
        batch.key_cache[block, position % 16, :, 0] = score
    seen = batch.seen
    for row, pair in enumerate(seen):
        if pair is not None:
            pair[0][:300, :, 0] = keys[:, None]
            batch.seen[row] = pair
    assert_matches(batch, "native")


def test_few_query_vectors_are_multiplied_by_fp32_instructions() -> None:
    """Splitting keys and values would take longer: a decode's bits do not depend on the switch."""
    batch = build([Request(75, 1), Request(130, 2)], WIDE)
    tiles, plain = both_ways(batch)
    rows = slice(0, 3)
    assert torch.equal(tiles[rows], plain[rows])
