"""Kernels compute in Triton's quick interpreter what they do without the plugin, to the last bit.

`test_interpreter.py` runs this, in a process where Triton interprets.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")

ROWS, COLUMNS = 4, 8


@triton.jit
def total(x):  # noqa: ANN001, ANN201  # of a kernel
    return tl.sum(x, axis=1)


@triton.jit
def every_kind(floats, halves, integers, bytes, out, sums, count: tl.constexpr, size: tl.constexpr):  # noqa: ANN001, ANN201
    """Types that are mixed, shapes that are made equal, integers that overflow, pointers, masks and reductions."""
    rows, columns = tl.arange(0, count), tl.arange(0, size)
    places = rows[:, None] * size + columns[None, :]
    mask = (places % 3 != 1) & (columns[None, :] < size - 1)
    x = tl.load(floats + places, mask=mask, other=-1.0)
    half = tl.load(halves + places).to(tl.float32) * 1.5
    wrapped = tl.load(integers + rows) + tl.load(integers + rows)
    code = tl.load(bytes + columns).to(tl.int8) >> 1
    y = tl.where(mask, x + half, code[None, :] * 2 + wrapped[:, None] // 3)
    for step in range(3):
        y += step * columns[None, :]
    tl.store(out + places, y.to(tl.bfloat16), mask=places > 1)
    tl.store(sums + rows, total(y) - tl.max(half, axis=1))


def run() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (ROWS, COLUMNS)
    floats = torch.randn(shape, generator=generator)
    halves = torch.randn(shape, generator=generator).bfloat16()
    integers = torch.tensor([2**31 - 1, -(2**31), 5, -7], dtype=torch.int32)
    codes = torch.arange(100, 100 + 8 * COLUMNS, 8, dtype=torch.uint8)
    out, sums = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(ROWS)
    every_kind[(1,)](floats, halves, integers, codes, out, sums, ROWS, COLUMNS)
    return out, sums


def test_cuda_kernels_compute_the_same_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.quick_interpreter import REPLACED

    quick = run()
    assert len({float(value) for value in quick[0].flatten()}) > ROWS, "else the comparison says nothing"
    replaced: tuple[tuple[Any, str, Any], ...] = REPLACED
    for owner, name, before in replaced:
        assert getattr(owner, name) is not before
        monkeypatch.setattr(owner, name, before)
    for one, other in zip(quick, run(), strict=True):
        assert torch.equal(one, other)
