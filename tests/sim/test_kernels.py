"""Kernels of the card: FusedSDPA against torch's own attention, softmax_fa2 against softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def qkv(heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, 5, 8).to("hpu") for n in (4, heads, heads))  # type: ignore[return-value]


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_sdpa(is_causal: bool, ht: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, k, v = qkv()
    found = FusedSDPA.apply(q, k, v, None, 0.0, is_causal, 0.5, "fast", True)
    expected = sdpa(q, k, v, is_causal=is_causal, scale=0.5, enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-6)


def test_fused_sdpa_with_a_mask() -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, k, v = qkv(4)
    mask = torch.randn(5, 5).to("hpu")
    found = FusedSDPA.apply(q, k, v, mask, 0.0, False, None, "None", False)
    assert torch.allclose(found, sdpa(q, k, v, attn_mask=mask), atol=1e-6)


@pytest.mark.parametrize("pad_side", ["left", "right"])
def test_fused_sdpa_with_pads(pad_side: str) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, k, v = qkv(4)
    valid = torch.tensor([3, 5], dtype=torch.int32, device="hpu")
    found = FusedSDPA.apply(q, k, v, None, 0.0, True, None, "fast", True, valid, pad_side)
    part = slice(0, 3) if pad_side == "right" else slice(2, 5)
    expected = sdpa(q[:1, :, part], k[:1, :, part], v[:1, :, part], is_causal=True)
    assert torch.allclose(found[:1, :, part], expected, atol=1e-6)
    assert torch.allclose(found[1:], sdpa(q[1:], k[1:], v[1:], is_causal=True), atol=1e-6)
    assert found[0].isnan().any(0).any(-1).sum() == 2, "what rows of pads hold is not defined"


def test_fused_sdpa_refuses(forbidden: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, k, v = qkv(4)
    with forbidden("a mask together with is_causal"):
        FusedSDPA.apply(q, k, v, torch.zeros(5, 5, device="hpu"), 0.0, True, None, "fast")
    with forbidden("dropout 0.5"):
        FusedSDPA.apply(q, k, v, None, 0.5, True, None, "fast")
    with forbidden("softmax_mode 'slow'"):
        FusedSDPA.apply(q, k, v, None, 0.0, True, None, "slow")
    with forbidden("valid_len without is_causal"):
        FusedSDPA.apply(q, k, v, None, 0.0, False, None, "fast", True, torch.tensor([1, 2], device="hpu"))


def unpad(padded: torch.Tensor, rows: int) -> torch.Tensor:
    """The first 8 entries of each 128."""
    return padded.unflatten(-1, (-1, 128))[..., :8].flatten(-2)[..., :rows]


@pytest.mark.parametrize("rows", [1, 8, 11])
def test_softmax_fa2_in_two_parts(rows: int, card: Any) -> None:
    torch.manual_seed(rows)
    scores = torch.randn(2, rows, 6).to(torch.bfloat16).to("hpu")
    padded = (2, (rows + 7) // 8 * 128)
    top = torch.full(padded, float("-inf"), dtype=torch.bfloat16, device="hpu")
    total = torch.zeros(padded, dtype=torch.bfloat16, device="hpu")
    first, top, total, _ = torch.ops.hpu.softmax_fa2(scores[..., :4], inputM=top, inputL=total)
    assert top.shape == padded
    second, top, total, fixup = torch.ops.hpu.softmax_fa2(scores[..., 4:], inputM=top, inputL=total)
    together = torch.cat([first * unpad(fixup, rows)[..., None], second], -1) / unpad(total, rows)[..., None]
    assert torch.allclose(together.float(), scores.float().softmax(-1), atol=0.03)
    assert torch.equal(unpad(top, rows), scores.amax(-1))


def test_softmax_fa2_refuses(card: Any, forbidden: Any) -> None:
    scores = torch.zeros(8, 4, dtype=torch.bfloat16, device="hpu")
    state = torch.zeros(128, dtype=torch.bfloat16, device="hpu")
    with forbidden("inputM is torch.bfloat16 (8,), expected torch.bfloat16 (128,)"):
        torch.ops.hpu.softmax_fa2(scores, inputM=state[:8], inputL=state)
    with forbidden("scores are torch.float64"):
        torch.ops.hpu.softmax_fa2(scores.double(), inputM=state, inputL=state)
    with forbidden("inputM is torch.bfloat16 (128,), expected torch.float32 (64,)"):
        torch.ops.hpu.softmax_fa2(scores.float(), inputM=state, inputL=state)
    card.device_type = "synDeviceGaudi2"
    with forbidden("needs a Gaudi 3"):
        torch.ops.hpu.softmax_fa2(scores, inputM=state, inputL=state)
