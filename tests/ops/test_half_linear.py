"""Linear layers in half precision: products by pairs of bfloat16, and few rows that are widened, against float64.

Tests of pairs have the word in their names: builds for other CPUs are tested without them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.half_linear import check, problem
from vllm_gaudi_ucm.ops.cpu.native import library, matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.half_rows import narrow_rows, widen_rows
from vllm_gaudi_ucm.ops.cpu.packed_linear import api
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PackedWeight, pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import find_pairs
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import NATIVE_ROWS

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
needs_kernels = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
needs_pairs = pytest.mark.skipif(
    find_pairs(torch.zeros(16, 2, dtype=torch.bfloat16)) is None, reason="this CPU multiplies no pairs of bfloat16"
)


@needs_pairs
@pytest.mark.parametrize(("outputs", "inputs"), [(5 * 64, 80), (3 * 48, 34), (7 * 32, 2), (16, 130)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 13, 65, 1030])
def test_pairs(outputs: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of every width, register blocks of every size, threads that share panels in halves, and no other copy."""
    x, weight, bias = problem(rows, outputs, inputs, torch.bfloat16)
    with matrix_unit.using(False):
        packed = pack(weight)
        assert packed.tensor is None
        before = torch.get_num_threads()
        poisoned = Tensor.new_empty
        monkeypatch.setattr(Tensor, "new_empty", lambda *given, **named: poisoned(*given, **named).fill_(float("nan")))
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                check(packed_linear(x, packed, bias), x, weight, bias)
                check(packed_linear(x, packed), x, weight, None)
            finally:
                torch.set_num_threads(before)


@needs_pairs
def test_pairs_keep_nan_in_its_row() -> None:
    """covers: D8."""
    x, weight, _ = problem(9, 128, 64, torch.bfloat16)
    x[4] = float("nan")
    found = packed_linear(x, pack(weight))
    assert found[4].isnan().all()
    assert found[[*range(4), *range(5, 9)]].isfinite().all()


@needs_pairs
def test_pairs_of_long_rows_have_a_copy_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "second_cache", lambda: 0)
    x, weight, bias = problem(NATIVE_ROWS + 1, 128, 64, torch.bfloat16)
    packed = pack(weight)
    assert packed.tensor is not None
    broken = packed._replace(pairs=find_pairs(torch.full_like(weight, float("nan"))))
    check(packed_linear(x, broken, bias), x, weight, bias)
    check(packed_linear(x[:5], packed._replace(tensor=torch.empty(0)), bias), x[:5], weight, bias)


@needs_pairs
def test_pairs_that_do_not_fit() -> None:
    """Nothing is read from beyond a tensor. Beside a matrix unit oneDNN has a copy of its own, and says so itself."""
    weight = torch.randn(64, 32).bfloat16()
    with matrix_unit.using(False):
        alone = pack(weight)
    for packed in (alone, pack(weight)):
        with pytest.raises(RuntimeError):
            packed_linear(torch.randn(3, 48).bfloat16(), packed)
        with pytest.raises(RuntimeError):
            packed_linear(torch.randn(3, 32).bfloat16(), packed, torch.randn(48).bfloat16())
        with pytest.raises(RuntimeError):
            packed_linear(torch.randn(3, 32), packed)
    with pytest.raises(RuntimeError, match="expected bfloat16 rows of 32"):
        packed_linear(torch.randn(3, 32), alone)


def without_pairs(weight: Tensor, monkeypatch: pytest.MonkeyPatch, units: bool) -> PackedWeight:
    monkeypatch.setattr(api, "find_pairs", lambda _: None)
    monkeypatch.setattr(api, "_has_units_for", lambda dtype: units or dtype == torch.float32)
    return pack(weight, compact=True)


@needs_kernels
@each_half
@pytest.mark.parametrize("rows", [0, 1, 4, 30, NATIVE_ROWS + 1])
@pytest.mark.parametrize("outputs", [192, 60])
def test_without_units_for_it(dtype: torch.dtype, rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in fp32, also where no panels fit."""
    x, weight, bias = problem(rows, outputs, 64, dtype)
    packed = without_pairs(weight, monkeypatch, units=False)
    assert packed.is_fp32
    check(packed_linear(x, packed, bias), x, weight, bias)


@needs_kernels
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("rows", [1, NATIVE_ROWS + 1])
def test_without_pairs_few_rows_are_widened(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With units, but without instructions for pairs: a compact copy for few rows, oneDNN's for more."""
    x, weight, bias = problem(rows, 192, 64, torch.bfloat16)
    packed = without_pairs(weight, monkeypatch, units=True)
    assert packed.compact is not None
    assert packed.tensor is not None
    without = packed._replace(tensor=torch.empty(0)) if rows == 1 else packed._replace(compact=None)
    check(packed_linear(x, without, bias), x, weight, bias)


@needs_kernels
@each_half
def test_every_number_there_and_back(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    wide = widen_rows(every)
    assert torch.equal(wide.isnan(), every.isnan())
    assert torch.equal(wide[~wide.isnan()], every.float()[~wide.isnan()])
    some = every[:100, 3:50]
    assert torch.equal(widen_rows(some), some.float())
    # between two numbers, ties included
    values = wide * (1 + 2.0**-9)
    out = torch.zeros(256, 300, dtype=dtype)
    narrow_rows(values, out[:, 10:266])
    expected = values.to(dtype)
    assert torch.equal(out[:, 10:266].isnan(), expected.isnan())
    assert torch.equal(out[:, 10:266][~expected.isnan()], expected[~expected.isnan()])
    assert not out[:, :10].any()
    assert not out[:, 266:].any()
