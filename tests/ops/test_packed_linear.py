"""Packed linear layers against float64, for the shapes and strides that a model's forward makes."""

import re

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.cpu.packed_linear import api, packing
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import can_pack, pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import NATIVE_ROWS

EPSILON = torch.finfo(torch.float32).eps


def budget(x: Tensor, weight: Tensor) -> Tensor:
    """Rounding of a dot product of n fp32 terms: at most n eps times the sum of absolute products (Higham, 3.1)."""
    return x.shape[-1] * EPSILON * (x.double().abs() @ weight.double().abs().T)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 129])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_float64(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 192), torch.randn(320, 192)
    bias = torch.randn(320) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = packed_linear(x, pack(weight), bias)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert ((found.double() - expected).abs() <= budget(x, weight) + EPSILON * expected.abs()).all()


def test_strided_rows_and_no_rows() -> None:
    weight = torch.randn(64, 32)
    wide = torch.randn(5, 64)
    packed = pack(weight)
    assert torch.equal(packed_linear(wide[:, :32], packed), packed_linear(wide[:, :32].contiguous(), packed))
    assert packed_linear(wide[:0, :32], packed).shape == (0, 64)


def test_packing_copies() -> None:
    """The runner frees the plain weight afterwards."""
    weight = torch.randn(64, 32)
    x = torch.randn(3, 32)
    packed = pack(weight)
    before = packed_linear(x, packed)
    weight.fill_(float("nan"))
    assert torch.equal(packed_linear(x, packed), before)


def test_nan_in_one_row_stays_there() -> None:
    """covers: D8 (a broken request must not reach another one, and must stay visible)."""
    weight, x = torch.randn(64, 32), torch.randn(4, 32)
    x[2] = float("nan")
    found = packed_linear(x, pack(weight))
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


def test_what_cannot_be_packed() -> None:
    assert can_pack(torch.randn(4, 4))
    assert not can_pack(torch.randn(4, 4).double())
    assert not can_pack(torch.empty(4, 4, device="meta"))


needs_panels = pytest.mark.skipif(
    pack(torch.randn(64, 16)).panels is None, reason="oneDNN packs in a format of its own here, or no native kernels"
)


def onednn_version() -> Version:
    found = re.search(r"MKL-DNN v([0-9.]+)", torch.__config__.show())
    return Version(found[1]) if found else Version("0")


@pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
@pytest.mark.skipif(onednn_version() < Version("3.12"), reason="keeps plain rows on a CPU without AVX-512")
def test_the_native_kernels_read_the_format_of_onednn() -> None:
    """A newer release with another format would take decode steps out of graphs, and nothing else would fail."""
    assert [pack(torch.randn(*shape)).panels is not None for shape in ((64, 16), (320, 80), (576, 1536))] == [True] * 3


@needs_panels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 13, 24, 25, NATIVE_ROWS])
def test_a_few_rows_are_multiplied_natively(threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that threads share in halves, register blocks of every size, and rows that lie apart."""
    torch.manual_seed(rows)
    before = torch.get_num_threads()
    x, weight, bias = torch.randn(rows, 100)[:, 3:83], torch.randn(5 * 64, 80), torch.randn(5 * 64)
    packed = pack(weight)._replace(tensor=torch.empty(0))  # oneDNN could not compute with this
    monkeypatch.setattr(torch, "empty", lambda *size: torch.full(*size, float("nan")))
    torch.set_num_threads(threads)
    try:
        found = packed_linear(x, packed, bias)
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ weight.double().T + bias.double()
    assert found.isfinite().all()
    assert ((found.double() - expected).abs() <= budget(x, weight) + EPSILON * expected.abs()).all()


@needs_panels
def test_another_format_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release or a CPU whose oneDNN packs otherwise must not give wrong numbers."""
    monkeypatch.setattr(packing, "_widths", {})
    monkeypatch.setattr(packing, "PANEL_WIDTHS", (8,))
    weight, x = torch.randn(64, 16), torch.randn(3, 16)
    packed = pack(weight)
    assert packed.panels is None
    torch.testing.assert_close(packed_linear(x, packed), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
@pytest.mark.parametrize("rows", [0, 1, 16, 100, 1030])
@pytest.mark.parametrize("outputs", [320, 96, 16])
def test_another_format_of_onednn_costs_no_native_products(
    monkeypatch: pytest.MonkeyPatch, outputs: int, rows: int
) -> None:
    """Panels of our own stand in for oneDNN's copy if they multiply any number of rows fast enough."""
    monkeypatch.setattr(api, "find_panels", lambda *_: None)
    monkeypatch.setattr(api, "_enough_alone", lambda inputs: True)
    torch.manual_seed(rows)
    weight, x, bias = torch.randn(outputs, 80), torch.randn(rows, 100)[:, 3:83], torch.randn(outputs)
    packed = pack(weight)
    assert packed.tensor is None
    expected, allowed = x.double() @ weight.double().T + bias.double(), budget(x, weight)
    weight.fill_(float("nan"))
    found = packed_linear(x, packed, bias)
    assert ((found.double() - expected).abs() <= allowed + EPSILON * expected.abs()).all()


def test_onednn_keeps_its_format_where_it_multiplies_many_rows_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies would double a model's memory."""
    monkeypatch.setattr(api, "find_panels", lambda *_: None)
    monkeypatch.setattr(api, "_enough_alone", lambda inputs: False)
    packed = pack(torch.randn(64, 32))
    assert packed.tensor is not None
    assert packed.panels is None


@pytest.mark.parametrize("rows", [1, 100])
def test_what_does_not_fit_raises(rows: int) -> None:
    """Nothing is read from beyond a tensor."""
    packed = pack(torch.randn(64, 32))
    with pytest.raises(RuntimeError):
        packed_linear(torch.randn(rows, 48), packed)
    with pytest.raises(RuntimeError):
        packed_linear(torch.randn(rows, 32), packed, torch.randn(48))


def test_outputs_that_onednn_pads() -> None:
    weight, x = torch.randn(100, 48), torch.randn(3, 48)
    torch.testing.assert_close(packed_linear(x, pack(weight)), x @ weight.T, rtol=1e-5, atol=1e-5)


@needs_panels
def test_a_format_is_compared_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_widths", {})
    first = pack(torch.randn(128, 48)).panels
    monkeypatch.setattr(packing, "_fitting_widths", lambda *_: pytest.fail("compared again"))
    second = pack(torch.randn(128, 48)).panels
    assert first is not None
    assert second is not None
    assert (second.width, second.address == first.address) == (first.width, False)


@needs_panels
def test_zeros_say_nothing_about_the_format_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look alike in panels of any width, and would be read in the first one that is tried."""
    monkeypatch.setattr(packing, "_widths", {})
    weight, x = torch.randn(192, 48), torch.randn(3, 48)
    monkeypatch.setattr(packing, "PANEL_WIDTHS", (32, 64))
    zeros = pack(torch.zeros(192, 48))
    assert not packed_linear(x, zeros).any()
    torch.testing.assert_close(packed_linear(x, pack(weight)), x @ weight.T, rtol=1e-5, atol=1e-5)


@needs_panels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(5, 7), (slice(None), 0), (slice(None), slice(None))])
def test_a_broken_weight_says_nothing_about_others(
    monkeypatch: pytest.MonkeyPatch, bad: float, place: tuple[int | slice, ...]
) -> None:
    """covers: D8. It stays visible, and other layers of its shape run as they would without it."""
    monkeypatch.setattr(packing, "_widths", {})
    broken, weight, x = torch.randn(192, 48), torch.randn(192, 48), torch.rand(3, 48) + 0.1
    broken[place] = bad
    first = pack(broken)
    assert first.panels is not None
    found = packed_linear(x, first)
    rows = broken.isfinite().all(1)
    assert not found[:, ~rows].isfinite().any()
    assert found[:, rows].isfinite().all()
    second = pack(weight)
    assert second.panels is not None
    torch.testing.assert_close(packed_linear(x, second), x @ weight.T, rtol=1e-5, atol=1e-5)


@needs_panels
@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_a_weight_that_fits_every_format_proves_none(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Also where its outputs divide into panels of one width only: in plain memory it would look the same."""
    kept: dict[torch.Size, int] = {}
    monkeypatch.setattr(packing, "_widths", kept)
    monkeypatch.setattr(packing, "PANEL_WIDTHS", (64,))
    pack(torch.full((192, 48), value))
    assert not kept
    pack(torch.randn(192, 48))
    assert kept == {torch.Size((192, 48)): 64}


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (0, 3, 32)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    weight, x = torch.randn(64, 32), torch.randn(shape)
    torch.testing.assert_close(packed_linear(x, pack(weight)), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 64), (60, 33)])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_float16_is_multiplied_in_fp32(outputs: int, inputs: int, rows: int) -> None:
    """Exact weights, sums in fp32, and one rounding; also where no panels fit, and of more dimensions."""
    torch.manual_seed(rows)
    weight, x, bias = torch.randn(outputs, inputs).half(), torch.randn(rows, inputs).half(), torch.randn(outputs).half()
    assert can_pack(weight)
    packed = pack(weight)
    found = packed_linear(x, packed, bias)
    assert found.dtype == torch.float16
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(packed_linear(x.view(rows, 1, inputs), packed, bias).view(rows, outputs), found)
    assert packed.is_fp32 != bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
