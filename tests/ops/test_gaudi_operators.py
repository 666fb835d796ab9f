"""What is found of Gaudi's operators: as we call them, missing, or with another schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.gaudi_kernels import KERNELS, RMS_NORM, ROTARY, gaudi_software, rms_norm, rotary
from vllm_gaudi_ucm.ops.hpu import operators as gaudi_operators
from vllm_gaudi_ucm.ops.hpu.operators import GAUDI_OPERATORS, GaudiOperator


def why_not(operator: GaudiOperator) -> str:
    found = operator.resolve()
    assert found.call is None
    return found.why


def test_without_the_bridge_nothing_is_found() -> None:
    for operator in GAUDI_OPERATORS:
        assert why_not(operator).startswith("habana_frameworks.torch cannot be imported: ")


def test_operators_as_we_call_them() -> None:
    x, gamma = torch.randn(1, 3, 8), torch.randn(8)
    with gaudi_software():
        found = gaudi_operators.RMS_NORM.resolve()
        assert found.call is not None
        assert found.why == "torch.ops.hpu.rms_norm(data_in, gamma, epsilon)"
        assert torch.equal(found.call(x, gamma, 1e-5)[0], rms_norm(x, gamma, 1e-5)[0])
        assert gaudi_operators.ROTARY.resolve().call is not None


def test_what_ended_is_not_found_again() -> None:
    with gaudi_software():
        assert gaudi_operators.ROTARY.resolve().call is not None
    with gaudi_software({RMS_NORM: rms_norm}):
        assert why_not(gaudi_operators.ROTARY) == "torch.ops.hpu has no rotary_pos_embedding"
        assert gaudi_operators.RMS_NORM.resolve().call is not None


@pytest.mark.parametrize(
    "schema",
    [
        RMS_NORM,
        "rms_norm(Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)",
        "rms_norm(Tensor data_in, Tensor? gamma, Scalar epsilon, bool fast_math=False) -> (Tensor, Tensor)",
        "rms_norm(Tensor data_in, Tensor gamma, float epsilon, *, bool fast_math=False) -> (Tensor, Tensor)",
    ],
)
def test_schemas_that_take_our_call(schema: str) -> None:
    with gaudi_software({schema: rms_norm}):
        assert gaudi_operators.RMS_NORM.resolve().call is not None


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("rms_norm(Tensor gamma, Tensor data_in, float epsilon) -> (Tensor, Tensor)", "argument 1 is gamma"),
        (
            "rms_norm(Tensor data_in, float epsilon, Tensor gamma) -> (Tensor, Tensor)",
            "argument 2 is epsilon, expected",
        ),
        (
            "rms_norm(Tensor data_in, Tensor gamma, Tensor epsilon) -> (Tensor, Tensor)",
            "epsilon is Tensor, expected float",
        ),
        ("rms_norm(Tensor data_in, Tensor gamma) -> (Tensor, Tensor)", "takes no epsilon or eps"),
        (
            "rms_norm(Tensor data_in, Tensor gamma, float epsilon, Tensor scale) -> (Tensor, Tensor)",
            "also needs scale, which this plugin does not pass",
        ),
        ("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> Tensor", "returns Tensor, expected 2 x Tensor"),
    ],
)
def test_schemas_that_do_not(schema: str, why: str) -> None:
    with gaudi_software({schema: rms_norm}):
        assert why in why_not(gaudi_operators.RMS_NORM)


def test_sine_and_cosine_in_another_order_are_noticed() -> None:
    swapped = ROTARY.replace("Tensor sin, Tensor cos", "Tensor cos, Tensor sin")
    with gaudi_software({swapped: rotary}):
        assert "argument 2 is cos, expected sin" in why_not(gaudi_operators.ROTARY)


class FusedSDPA(torch.autograd.Function):
    """The wrapper's signature of Gaudi software 1.24."""

    @staticmethod
    def forward(
        ctx: object,
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Any = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: Any = None,
    ) -> Any:
        return q


class OldSDPA(torch.autograd.Function):
    """Without a softmax mode."""

    @staticmethod
    def forward(ctx: object, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0) -> Any:
        return q


def anything(*args: Any) -> Any:
    return args[0]


def keywords(q: Any, k: Any, v: Any, mask: Any, dropout: Any, is_causal: Any, scale: Any, softmax_mode: Any,
             recompute: Any, **options: Any) -> Any:  # fmt: skip
    return q


@pytest.mark.parametrize("wrapper", [FusedSDPA, keywords])
def test_wrappers_of_the_bridge(wrapper: Any) -> None:
    with gaudi_software(FusedSDPA=wrapper):
        call = gaudi_operators.FUSED_SDPA.resolve().call
    assert call == (wrapper.apply if isinstance(wrapper, type) else wrapper)


@pytest.mark.parametrize(
    ("wrappers", "why"),
    [
        ({}, "habana_frameworks.torch.hpex.kernels has no FusedSDPA"),
        ({"FusedSDPA": OldSDPA}, "takes no is_causal"),
        ({"FusedSDPA": anything}, "takes *args, which does not name its parameters"),
    ],
)
def test_wrappers_that_do_not_take_our_call(wrappers: dict[str, Callable[..., Any]], why: str) -> None:
    with gaudi_software(KERNELS, **wrappers):
        assert why in why_not(gaudi_operators.FUSED_SDPA)
