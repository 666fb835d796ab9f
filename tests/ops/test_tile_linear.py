"""Linear layers on the CPU's matrix unit: as exact as fp32 arithmetic, whatever the form of the weight and the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.compact_weights import MAKERS
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.packed_linear import api
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import PackedWeight, pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import Form, Panels
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Way

needs_tiles = pytest.mark.skipif(not matrix_unit.available(), reason=matrix_unit.why_not() or "there is one")
EPSILON = torch.finfo(torch.float32).eps
FORMS = (Form.BFLOAT16, Form.AFFINE4, Form.SYMMETRIC8, None)  # None: of those in fewer bits, so fp32 panels
NAN = float("nan")


def make(form: Form | None, outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs) if form is None else MAKERS[form](outputs, inputs)


def packed(weight: Tensor, form: Form | None) -> PackedWeight:
    """With nothing but the form that the matrix unit reads."""
    if form is None:
        width = next(width for width in (64, 48, 32, 16) if len(weight) % width == 0)
        panels = weight.view(-1, width, weight.shape[1]).transpose(1, 2).contiguous()
        return PackedWeight(None, *weight.shape, Panels(panels, panels.data_ptr(), width))
    found = pack(weight, compact=True)
    assert found.compact is not None
    assert (found.tensor, found.panels) == (None, None)
    return found


def check(x: Tensor, weight: Tensor, found: Tensor, bias: Tensor | None = None) -> None:
    """The error is at most that of fp32: n + 1 roundings of sums of absolute values (Higham, 3.1)."""
    offset = torch.zeros(len(weight)) if bias is None else bias
    exact = x.double() @ weight.double().T + offset.double()
    absolute = x.double().abs() @ weight.double().abs().T + offset.double().abs()
    assert found.isfinite().all()
    assert ((found.double() - exact).abs() <= (x.shape[1] + 1) * EPSILON * absolute).all()
    # far below that bound, as rounding errors are: no worse than torch's own fp32
    plain = torch.nn.functional.linear(x, weight, bias)
    assert (found.double() - exact).norm() <= 1.5 * (plain.double() - exact).norm() + EPSILON * exact.norm()


@pytest.fixture
def every_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix unit for any number of rows, and results that start as NaN."""
    monkeypatch.setattr(api, "fastest_way", lambda *_: Way.TILES)
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *size: self.new_full(torch.Size(size[0] if len(size) == 1 else size), NAN)
    )


@needs_tiles
def test_weights_of_float16_have_no_codes() -> None:
    """They would lose bits in products of bfloat16."""
    assert pack(MAKERS[Form.FLOAT16](64, 96), compact=True).compact is None


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 47, 256, 257, 2000])
def test_equals_float64(form: Form | None, rows: int) -> None:
    """Rows that lie apart, a bias, blocks of rows that are not full, several chunks of rows."""
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 140)[:, 3:131], make(form, 5 * 64, 128), torch.randn(5 * 64)
    check(x, weight, packed_linear(x, packed(weight, form), bias), bias)


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 64), (80, 1184), (192, 608), (64, 1728)])
def test_sizes_of_weights(form: Form | None, outputs: int, inputs: int) -> None:
    """Panels of several widths, and more inputs than are multiplied at once."""
    x, weight = torch.randn(19, inputs), make(form, outputs, inputs)
    check(x, weight, packed_linear(x, packed(weight, form)))


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize("inputs", [1, 8, 31, 32, 33, 100, 577])
def test_inputs_that_do_not_fill_a_tile(inputs: int) -> None:
    x, weight = torch.randn(33, inputs), torch.randn(64, inputs)
    check(x, weight, packed_linear(x, packed(weight, None)))


@needs_tiles
@pytest.mark.parametrize("form", FORMS)
def test_results_are_the_same_bits(form: Form | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across runs, numbers of threads, and numbers of rows that the matrix unit is used for."""
    monkeypatch.setattr(api, "fastest_way", lambda *_: Way.TILES)
    x, weight = torch.randn(300, 640), packed(make(form, 7 * 64, 640), form)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(packed_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert torch.equal(packed_linear(x[:35], weight), found[0][:35])


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(form: Form | None, value: float) -> None:
    """covers: D8 (a broken request must not reach another one, and must stay visible). Inf may become NaN."""
    x, weight = torch.randn(40, 64), make(form, 64, 64)
    x[20, 5] = value
    found = packed_linear(x, packed(weight, form))
    assert not found[20].isfinite().any()
    others = [row for row in range(40) if row != 20]
    check(x[others], weight, found[others])


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e30])
def test_magnitudes(scale: float) -> None:
    """bfloat16 has the exponents of fp32."""
    x, weight = torch.randn(17, 96) * scale, torch.randn(64, 96)
    check(x, weight, packed_linear(x, packed(weight, None)))


@needs_tiles
@pytest.mark.usefixtures("every_row_count")
def test_a_broken_weight_stays_visible() -> None:
    """covers: D8"""
    weight = torch.randn(64, 64)
    weight[3, 9] = float("inf")
    found = packed_linear(torch.ones(70, 64), packed(weight, None))
    assert not found[:, 3].isfinite().any()
    assert found[:, :3].isfinite().all()


@needs_tiles
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_switched_off_the_other_kernels_multiply(rows: int) -> None:
    """Also a weight that was packed while it was on, and so has nothing but its compact form."""
    x, weight = torch.randn(rows, 64), make(Form.AFFINE4, 64, 64)
    for_tiles = packed(weight, Form.AFFINE4)
    with matrix_unit.using(False):
        for known in (for_tiles, pack(weight, compact=True)):
            torch.testing.assert_close(packed_linear(x, known), x @ weight.T, rtol=1e-4, atol=1e-4)


@needs_tiles
def test_what_does_not_fit_raises_without_onednn_too() -> None:
    """Nothing is read from beyond a tensor."""
    known = packed(make(Form.BFLOAT16, 64, 32), Form.BFLOAT16)
    for x, bias in [
        (torch.randn(3, 48), None),
        (torch.randn(3, 32), torch.randn(48)),
        (torch.randn(3, 32).double(), None),
    ]:
        with pytest.raises(RuntimeError, match="64 outputs and 32 inputs"):
            packed_linear(x, known, bias)


def parts(values: Tensor) -> list[Tensor]:
    """As the kernels split fp32: three bfloat16, the most significant first."""
    found, rest = [], values
    for _ in range(3):
        found.append(rest.bfloat16().float())
        rest = rest - found[-1]
    return found


def test_the_arithmetic_in_torch() -> None:
    """On any machine: three parts are exact, and six products of two such sums leave out less than fp32 rounds away."""
    x, weight = torch.randn(64, 96), torch.randn(80, 96)
    assert torch.equal(sum(parts(x), torch.zeros_like(x)), x)
    a, b = parts(x.clone()), parts(weight)
    kept = sum(a[i].double() @ b[j].double().T for i in range(3) for j in range(3 - i))
    left_out = (x.double() @ weight.double().T - kept).abs()
    assert (left_out <= 2 * EPSILON * (x.double().abs() @ weight.double().abs().T)).all()
    assert left_out.max() > 0
