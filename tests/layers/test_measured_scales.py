"""Scales of measured maxima, and weights quantised with them, compared with INC's rules written out."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_gaudi_ucm.layers.measured.quant_config import SCALE_METHODS
from vllm_gaudi_ucm.layers.measured.scales import RANGES, narrowing_of, quantise, row_scale, scales_of

HW = SCALE_METHODS["MAXABS_HW"]


@pytest.mark.parametrize(
    ("card", "maximum", "rows", "weights"),
    [
        # Gaudi 3: up to powers of two of maximum / 112 and maximum / 224
        ("GAUDI3", 112.0, 1.0, 0.5),
        ("GAUDI3", 113.0, 2.0, 1.0),
        ("GAUDI3", 3.5, 2.0**-5, 2.0**-6),
        ("GAUDI3", 0.0, 2.0**-55, 2.0**-55),
        ("GAUDI3", 1e30, 128.0, 128.0),
        # Gaudi 2: up to powers of 16 of maximum / 60 and maximum / 120
        ("GAUDI2", 60.0, 1.0, 1.0),
        ("GAUDI2", 61.0, 16.0, 1.0),
        ("GAUDI2", 3.0, 2.0**-4, 2.0**-4),
        ("GAUDI2", 1e-6, 2.0**-8, 2.0**-8),
        ("GAUDI2", 1e9, 16.0, 16.0),
    ],
)
def test_scales_of_the_hardware(card: str, maximum: float, rows: float, weights: float) -> None:
    assert row_scale(maximum, HW, RANGES[card]) == rows
    assert float(scales_of(torch.tensor(maximum), HW.weights, HW.weights_backoff, RANGES[card])) == weights


@pytest.mark.parametrize(
    ("method", "maximum", "rows", "weights"),
    [
        # these maxima have other scales if the quotient is rounded once
        ("MAXABS_HW", 14.0625, 2.0**-3, 2.0**-4),
        ("MAXABS_HW", 0.88671875, 2.0**-7, 2.0**-8),
        ("MAXABS_ARBITRARY", 17.25, 0.1533203125, 0.07666015625),
        ("MAXABS_ARBITRARY", 28.125, 0.25, 0.125),
    ],
)
def test_scales_in_published_files(method: str, maximum: float, rows: float, weights: float) -> None:
    """INC wrote these scales of rows on a Gaudi 3; weights have twice the range."""
    of_rows = SCALE_METHODS[method]
    assert row_scale(maximum, of_rows, RANGES["GAUDI3"]) == rows
    found = scales_of(torch.tensor(maximum), of_rows.weights, of_rows.weights_backoff, RANGES["GAUDI3"])
    assert float(found) == weights


def test_other_methods() -> None:
    card = RANGES["GAUDI3"]
    found = {name: row_scale(100.0, method, card) for name, method in SCALE_METHODS.items()}
    assert found["UNIT_SCALE"] == 1.0
    assert found["HW_ALIGNED_SINGLE_SCALE"] == 128.0
    assert found["MAXABS_POW2"] == found["ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2"] == 1.0
    assert found["MAXABS_ARBITRARY"] == float(torch.tensor(100 * float(torch.tensor(1 / 112).bfloat16())).bfloat16())
    assert row_scale(100.0, HW._replace(rows_backoff=1.0), card) == 0.25
    # a range of zeros has no scale of its own
    assert (
        row_scale(0.0, SCALE_METHODS["MAXABS_POW2"], card)
        == row_scale(0.0, SCALE_METHODS["MAXABS_ARBITRARY"], card)
        == 1.0
    )


def test_bfloat16_is_a_step_lower_at_most() -> None:
    """For every bfloat16 from 2 ** -4 to 2 ** 10. Such a maximum uses half of the range, so nothing saturates."""
    maxima = torch.arange(0x3D80, 0x4480, dtype=torch.int16).view(torch.bfloat16)
    card, differing = RANGES["GAUDI3"], 0
    for backoff in (0.25, 0.5):
        found = scales_of(maxima, "hardware", backoff, card).float()
        exact = torch.tensor([2.0 ** math.ceil(math.log2(one / (448 * backoff))) for one in maxima.double().tolist()])
        assert bool(((found == exact) | (found == exact / 2)).all())
        assert bool((maxima.float() / found <= 0.52 * 448).all())
        differing += int((found != exact).sum())
    assert differing == 59


@pytest.mark.parametrize("name", SCALE_METHODS)
@pytest.mark.parametrize("card", RANGES)
def test_quantised_weights(name: str, card: str) -> None:
    """Codes are within the card's range, and within half a step of three bits of the numbers."""
    method, range_of_card = SCALE_METHODS[name], RANGES[card]
    weight = (
        torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16() * torch.logspace(-2, 1, 24)[:, None]
    )
    weight = weight.bfloat16()
    weight[5] = 0
    rows = narrowing_of(0.5, range_of_card)
    found = quantise(weight, method, range_of_card, rows)
    found.check()
    assert found.narrowing is rows
    assert len(found.scales.unique()) == 1 or method.by_channel
    codes = found.codes.float()
    assert float(codes.abs().amax()) <= range_of_card.largest
    meant = codes * found.scales
    assert bool((meant[5] == 0).all())
    if method.needs_maxima:
        error = (meant - weight.float()).abs()
        assert bool((error <= weight.float().abs() * (2.0**-4 + 2.0**-7) + found.scales * 2.0**-10).all())


def test_rows_narrowed_with_an_inverse_in_bfloat16() -> None:
    found = narrowing_of(0.3, RANGES["GAUDI2"])
    scale = torch.tensor(0.3, dtype=torch.bfloat16)
    assert (float(found.scale), float(found.inverse), found.largest) == (float(scale), float(1 / scale), 240.0)
