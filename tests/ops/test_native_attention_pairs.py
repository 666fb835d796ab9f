"""Attention by pairs of bfloat16, against float64 and a derived budget; and rows of half precision where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.batch import Batch, Request, build
from tests.ops.native_attention import MIXED, attend_natively
from tests.ops.native_attention_pairs import BRAIN, check
from vllm_gaudi_ucm.ops.cpu.native import library, matrix_unit
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import find_pairs
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import native_jobs
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

pytestmark = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
needs_pairs = pytest.mark.skipif(
    find_pairs(torch.zeros(16, 2, dtype=torch.bfloat16)) is None, reason="this CPU multiplies no pairs of bfloat16"
)


@pytest.fixture(autouse=True)
def no_matrix_unit() -> Iterator[None]:
    with matrix_unit.using(False):
        yield


@needs_pairs
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 36), (128, 32), (2, 1), (96, 65)])
@pytest.mark.parametrize("row_tile", [5, 64])
def test_pairs(dim: int, value_dim: int, row_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A9, A13. Large scores, heads that fill no register, partial results that merge."""
    monkeypatch.setattr(native_jobs, "ROW_TILE", row_tile)
    batch = build([*MIXED, Request(200, 33)], replace(BRAIN, dim=dim, value_dim=value_dim))
    batch.query.mul_(16)
    finite, out = attend_natively(batch)
    assert finite
    check(batch, out)


@needs_pairs
def test_pairs_of_equal_values_leave_that_value() -> None:
    """Rounded weights are shares of their own sum, in any tile and in merged results."""
    batch = build([*MIXED, Request(300, 70)], BRAIN)
    value = torch.tensor(1.6640625, dtype=torch.bfloat16)
    batch.value.fill_(value)
    batch.value_cache.fill_(value)
    batch.query.mul_(8)
    finite, out = attend_natively(batch)
    assert finite
    rows = [row for row, seen in enumerate(batch.seen) if seen is not None]
    assert (out[rows] == value).all()


def test_an_odd_head_is_multiplied_in_floats() -> None:
    """It has no whole pairs; the budget holds without any of it."""
    batch = build(MIXED, replace(BRAIN, dim=33))
    finite, out = attend_natively(batch)
    assert finite
    check(batch, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_read_and_written_where_they_lie(dtype: torch.dtype) -> None:
    """Query, key and value side by side, as a merged projection leaves them; an output with gaps."""
    batch = build(MIXED, replace(BRAIN, dtype=dtype))
    rows = len(batch.query)
    merged = torch.cat([tensor.flatten(1) for tensor in (batch.query, batch.key, batch.value)], 1)
    query, key, value = merged.split([6 * 64, 2 * 64, 2 * 64], 1)
    apart = replace(batch, query=query.view(rows, 6, 64), key=key.view(rows, 2, 64), value=value.view(rows, 2, 64))
    assert not apart.query.is_contiguous()
    finite, expected = attend_natively(batch)
    found_finite, found = attend_natively(apart)
    assert finite
    assert found_finite
    assert torch.equal(found, expected)
    wide = torch.zeros(rows, 7, 64, dtype=dtype)
    attend_into(batch, wide[:, :6])
    assert torch.equal(wide[:, :6], expected)
    assert not wide[:, 6].any()


def attend_into(batch: Batch, out: Tensor) -> None:
    attention = ATTENTION.make("native")
    plan = attention.plan(batch.parts, batch.key_cache.shape[1])
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    assert attention.attend(*tensors, plan, batch.spec, out)
