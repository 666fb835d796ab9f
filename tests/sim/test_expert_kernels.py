"""`mixture_of_experts` in all its forms, against the experts one by one, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

PT_HPU_LAZY_MODE = "0"
BF16 = torch.bfloat16


def on_card(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("hpu")


class Experts:
    """Three experts of 4 x 6, two chosen of each of 5 tokens."""

    def __init__(self) -> None:
        self.x = on_card(5, 4, dtype=torch.float32)
        self.router = on_card(5, 2, dtype=torch.float32, seed=1)
        self.routing = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device="hpu")
        self.w12 = [on_card(12, 4, dtype=torch.float32, seed=2 + i) for i in range(3)]
        self.w3 = [on_card(4, 6, dtype=torch.float32, seed=5 + i) for i in range(3)]

    def call(self, activation: str = "silu", first: int = 0, last: int = 2, **changed: Any) -> Tensor:
        named = {"hidden_states": self.x, "expert_routing_table": self.routing, "router_weights": self.router}
        named |= {"w12": self.w12[first : last + 1], "w3": self.w3[first : last + 1], "permuted_weights": True}
        named |= {"activation": activation, "experts_min": first, "experts_max": last}
        return torch.ops.hpu.mixture_of_experts(**{**named, **changed})

    def expected(self, activation: str = "silu") -> Tensor:
        act = {"silu": functional.silu, "gelu": lambda x: functional.gelu(x, approximate="tanh")}[activation]
        rows = []
        for x, router, routing in zip(self.x.cpu(), self.router.cpu(), self.routing.tolist(), strict=True):
            outs = []
            for number in routing:
                gate, up = (self.w12[number].cpu() @ x).chunk(2)
                outs.append(self.w3[number].cpu() @ (act(gate) * up))
            rows.append(router[0] * outs[0] + router[1] * outs[1])
        return torch.stack(rows)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_mixture_of_experts(activation: str) -> None:
    experts = Experts()
    expected = experts.expected(activation)
    torch.testing.assert_close(experts.call(activation).cpu(), expected)
    parts = experts.call(activation, 0, 0) + experts.call(activation, 1, 2)
    torch.testing.assert_close(parts.cpu(), expected, msg="the sum of two ranks' parts")
    w1, w2 = zip(*(weight.chunk(2) for weight in experts.w12), strict=True)
    plain = (experts.x, experts.routing, experts.router, list(w1), list(w2), experts.w3, True, activation, 0, 2)
    torch.testing.assert_close(torch.ops.hpu.mixture_of_experts(*plain).cpu(), expected)
    straight = {"w12": [weight.t() for weight in experts.w12], "w3": [weight.t() for weight in experts.w3]}
    torch.testing.assert_close(experts.call(activation, **straight, permuted_weights=False).cpu(), expected)


def test_mixture_of_experts_in_8_bits(card: Any) -> None:
    """Against the same numbers in full precision."""
    experts = Experts()
    e4m3, one = torch.float8_e4m3fn, torch.ones((), device="hpu")
    narrow = {"w12": [w.to(e4m3) for w in experts.w12], "w3": [w.to(e4m3) for w in experts.w3]}
    scales = {"d_scale_w12": [one] * 3, "d_scale_w3": [one] * 3, "d_scale_intermediate_hidden_states": [one / 8] * 3}
    router = experts.router.to(BF16)
    x = experts.x.to(e4m3)
    found = experts.call(hidden_states=x, router_weights=router, d_scale_hidden_states=one, **narrow, **scales)
    assert found.dtype == BF16
    experts.x, experts.router = x.float(), router.float()
    experts.w12, experts.w3 = [w.float() for w in narrow["w12"]], [w.float() for w in narrow["w3"]]
    expected = experts.expected()
    error = (found.cpu().float() - expected).norm() / expected.norm()
    assert error < 0.1, "the inner activations have 8 bits"


def dynamic(*arguments: Any) -> Tensor:
    return torch.ops.hpu.mixture_of_experts.fp8_fused_weights_dynamic(*arguments, True, "silu", 0, 2)


def test_mixture_of_experts_in_8_bits_with_scales_of_rows(forbidden: Any) -> None:
    """Against the same numbers in full precision; scales of outputs, and of rows."""
    experts = Experts()
    e4m3 = torch.float8_e4m3fn
    w12, w3 = [w.to(e4m3) for w in experts.w12], [w.to(e4m3) for w in experts.w3]
    s12, s3 = ([on_card(len(w), dtype=torch.float32, seed=9).abs() + 0.1 for w in ws] for ws in (w12, w3))
    x, scale = experts.x.to(e4m3), torch.arange(1, 6, device="hpu").float().view(5, 1)
    given = (x, experts.routing, experts.router.to(BF16), w12, w3, scale, s12, s3)
    with forbidden("called outside of a compiled region"):
        dynamic(*given)
    found = torch.compile(dynamic, backend="hpu_backend", dynamic=False, fullgraph=True)(*given)
    assert found.dtype == BF16
    experts.x, experts.router = x.float() * scale, experts.router.to(BF16).float()
    experts.w12 = [w.float() * s.view(-1, 1) for w, s in zip(w12, s12, strict=True)]
    experts.w3 = [w.float() * s.view(-1, 1) for w, s in zip(w3, s3, strict=True)]
    expected = experts.expected()
    error = (found.cpu().float() - expected).norm() / expected.norm()
    assert error < 0.1, "the inner activations have 8 bits"


def test_mixture_of_experts_with_biases_is_that_of_gpt_oss() -> None:
    experts = Experts()
    ones = [torch.ones(n, device="hpu") for n in (12, 4)]
    found = torch.ops.hpu.mixture_of_experts.bias_fused_weights(
        *(experts.x, experts.routing, experts.router, experts.w12, experts.w3, [ones[0]] * 3, [ones[1]] * 3),
        permuted_weights=True,
        experts_min=0,
        experts_max=2,
    )
    x, number, weight = experts.x[0].cpu(), experts.routing[0].tolist(), experts.router[0].cpu()
    expected = torch.zeros(4)
    for chosen, share in zip(number, weight, strict=True):
        both = experts.w12[chosen].cpu() @ x + 1
        gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        expected += share * (experts.w3[chosen].cpu() @ inner + 1)
    torch.testing.assert_close(found[0].cpu(), expected)


def mxfp4(x: Tensor, routing: Tensor, router: Tensor, w12: Tensor, w3: Tensor, s12: Tensor, s3: Tensor) -> Tensor:
    return torch.ops.hpu.mixture_of_experts.mxfp4_fused_weights(x, routing, router, [w12], [w3], [s12], [s3])


def test_mixture_of_experts_in_4_bits_is_of_regions(forbidden: Any) -> None:
    x, router = on_card(2, 32), torch.ones(2, 1, dtype=BF16, device="hpu")
    routing = torch.zeros(2, 1, dtype=torch.int32, device="hpu")
    # every weight is 2 (bits 0100), every scale 2 ** -1
    w12, w3 = (torch.full(shape, 0x44, dtype=torch.uint8, device="hpu") for shape in ((64, 16), (32, 16)))
    scales = [torch.full((rows, 1), 126, dtype=torch.uint8, device="hpu") for rows in (64, 32)]
    with forbidden("called outside of a compiled region"):
        mxfp4(x, routing, router, w12, w3, *scales)
    compiled = torch.compile(mxfp4, backend="hpu_backend", dynamic=False, fullgraph=True)
    found = compiled(x, routing, router, w12, w3, *scales).cpu().float()
    inner = x.cpu().float().sum(-1, keepdim=True)
    expected = (functional.silu(inner) * inner * 32).expand(2, 32)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.1)
    with forbidden("the routing table is torch.int64"):
        compiled(x, routing.long(), router, w12, w3, *scales)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda e: {"expert_routing_table": e.routing.int()}, "the routing table is torch.int32"),
        (
            lambda e: {"router_weights": e.router.to(BF16)},
            "router weights are torch.bfloat16, activations torch.float32",
        ),
        (lambda e: {"w3": [w.to(BF16) for w in e.w3]}, "w3 is torch.bfloat16, activations torch.float32"),
        (lambda e: {"w12": e.w12[:2]}, "2 matrices w12 for experts 0 to 2"),
        (lambda e: {"activation": "swiglu"}, "activation 'swiglu'"),
    ],
)
def test_what_mixture_of_experts_refuses(
    changed: Callable[[Experts], dict[str, Any]], text: str, forbidden: Any
) -> None:
    experts = Experts()
    with forbidden(text):
        experts.call(**changed(experts))
