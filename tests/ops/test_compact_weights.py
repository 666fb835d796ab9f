"""Weights in fewer bits: found exactly where every value fits, and multiplied like any other weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.compact_weights import MAKERS, four_bits
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.cpu.packed_linear import packing
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import ALONE_LANES, pack, packed_linear, second_cache
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import GROUP, Form, find_compact
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import NATIVE_ROWS

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels on this machine")
EPSILON = torch.finfo(torch.float32).eps


# the matrix unit multiplies bfloat16, so weights of float16 stay as they are beside it
FORMS = [form for form in Form if form is not Form.FLOAT16 or not matrix_unit.in_use()]
BYTES = {Form.AFFINE4: 0.5 + 8 / GROUP, Form.SYMMETRIC8: 1 + 4 / GROUP, Form.BFLOAT16: 2, Form.FLOAT16: 2}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_found_and_smaller(form: Form) -> None:
    weight = MAKERS[form](192, 96)
    found = find_compact(weight)
    assert found is not None
    assert found.form == form
    assert found.nbytes == weight.numel() * BYTES[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [(0, 0), (2100, 31), (-1, -1)])
def test_one_value_that_does_not_fit_is_enough(form: Form, place: tuple[int, int]) -> None:
    """Also behind the sample, and in another chunk than the first."""
    weight = MAKERS[form](2112, 64)
    weight[place] = torch.nextafter(weight[place], torch.tensor(float("inf")))
    assert find_compact(weight) is None


@pytest.mark.parametrize("weight", [torch.full((64, 64), float("nan")), torch.full((64, 64), float("inf"))])
def test_what_is_not_finite_keeps_its_values(weight: Tensor) -> None:
    """covers: D8 (a broken weight must stay visible)."""
    found = packed_linear(torch.ones(2, 64), pack(weight, compact=True))
    assert not found.isfinite().any()


@pytest.mark.parametrize("weight", [torch.zeros(64, 64), torch.randn(64, 40), torch.randn(60, 64), torch.randn(64, 64)])
def test_shapes_and_values_of_no_form(weight: Tensor) -> None:
    found = find_compact(weight)
    assert (found is None) == bool(weight.any())
    x = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(packed_linear(x, pack(weight, compact=True)), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 16, NATIVE_ROWS])
def test_equals_float64(form: Form, threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that lie apart, panels that threads share in halves, outputs poisoned, oneDNN's copy out of reach."""
    torch.manual_seed(rows)
    before = torch.get_num_threads()
    x, weight, bias = torch.randn(rows, 100)[:, 2:98], MAKERS[form](5 * 64, 96), torch.randn(5 * 64)
    packed = pack(weight, compact=True)._replace(tensor=torch.empty(0), panels=None)
    assert packed.compact is not None
    monkeypatch.setattr(Tensor, "new_empty", lambda self, size: self.new_full(size, float("nan")))
    torch.set_num_threads(threads)
    try:
        found = packed_linear(x, packed, bias)
    finally:
        torch.set_num_threads(before)
    exact = x.double() @ weight.double().T + bias.double()
    budget = (x.shape[1] + 1) * EPSILON * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    assert found.isfinite().all()
    assert ((found.double() - exact).abs() <= budget).all()


@pytest.mark.parametrize("form", FORMS)
def test_as_many_rows_as_are_multiplied_at_once_and_one_more(form: Form) -> None:
    """Without oneDNN's copy a prompt is multiplied in pieces of 1024 rows; the error is no larger than oneDNN's."""
    torch.manual_seed(1)
    x, weight = torch.randn(1025, 576), MAKERS[form](64, 576)
    alone = pack(weight, compact=True)._replace(tensor=None, panels=None)
    with matrix_unit.using(False):
        found, plain = packed_linear(x, alone), packed_linear(x, pack(weight))
    exact = x.double() @ weight.double().T
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


# of which a panel takes half of the second cache, and more
MOST_INPUTS = second_cache() // (2 * 4 * 64) // GROUP * GROUP


@pytest.mark.parametrize("inputs", [MOST_INPUTS, MOST_INPUTS + GROUP])
def test_a_copy_for_onednn_is_kept_where_panels_leave_the_cache(inputs: int) -> None:
    kernels = native()
    assert kernels is not None
    with matrix_unit.using(False):
        packed = pack(four_bits(64, inputs), compact=True)
    assert packed.compact is not None
    assert (packed.tensor is None) == (kernels.ucm_lanes() >= ALONE_LANES and inputs <= MOST_INPUTS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", [48, 16, 80])
def test_panels_of_other_widths(form: Form, outputs: int) -> None:
    weight, x = MAKERS[form](outputs, 64), torch.randn(5, 64)
    found = find_compact(weight)
    assert found is not None
    assert found.width in packing.COMPACT_WIDTHS
    torch.testing.assert_close(packed_linear(x, pack(weight, compact=True)), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_without_native_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "native", lambda: None)
    assert find_compact(four_bits(64, 64)) is None
