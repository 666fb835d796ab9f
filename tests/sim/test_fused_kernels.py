"""Fused kernels: values against the plain operators, dtypes and roundings, and each argument that must be refused."""

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


def recomputed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, mode: str = "None", **named: Any) -> Any:
    given = {"causal": False, "backward": True, "valid": None, "side": "left", **named}
    return torch.ops.hpu.sdpa_recomp_fwd(
        q, k, v, mask, 0.0, 0.5, given["causal"], given["backward"], mode, given["valid"], given["side"]
    )


@pytest.mark.parametrize(("mode", "kept"), [("None", torch.float32), ("fast", BF16), ("fp32", torch.float32)])
def test_statistics(mode: str, kept: torch.dtype) -> None:
    q, k, v = (on_card(2, 4, 5, 8, seed=seed) * 4 for seed in range(3))
    out, m, linv, seed = recomputed(q, k, v, mode=mode)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * 0.5
    assert (out.dtype, m.dtype, linv.dtype, seed.dtype) == (BF16, BF16, kept, torch.int32)
    assert m.shape == linv.shape == (2, 4, 5, 1)
    top = scores.amax(-1, keepdim=True)
    assert torch.equal(m, top.to(BF16)), "the largest score, rounded"
    assert not torch.equal(m.float(), top)
    assert torch.equal(linv, (1 / torch.exp(scores - top).sum(-1, keepdim=True)).to(kept)), "not about the rounded one"
    torch.testing.assert_close(out.float(), scores.softmax(-1) @ v.float(), atol=0.1, rtol=0.02)
    assert out.device == torch.device("hpu", 0)


def test_statistics_without_backward_are_nothing() -> None:
    out, m, linv, _ = recomputed(*(on_card(1, 2, 3, 4) for _ in range(3)), backward=False)
    assert out.isfinite().all()
    assert m.isnan().all() and linv.isnan().all()  # noqa: PT018


def test_groups_of_heads_are_five_dimensional(forbidden: Any) -> None:
    q, k, v = on_card(1, 4, 3, 8), on_card(1, 2, 6, 8, seed=1), on_card(1, 2, 6, 8, seed=2)
    with forbidden("4 heads on 2 of keys in 4-d"):
        recomputed(q, k, v)
    out, m, *_ = recomputed(q.unflatten(1, (2, 2)), k.unsqueeze(2), v.unsqueeze(2))
    assert m.shape == (1, 2, 2, 3, 1)
    expected = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out.flatten(1, 2).float(), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_that_sees_nothing(zeros: bool, card: Any) -> None:
    card.masked_rows_are_zero = zeros
    q = on_card(1, 1, 2, 4)
    mask = torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]]).to("hpu")
    out = recomputed(q, q, q, mask)[0]
    assert out[0, 0, 0].isfinite().all()
    assert (out[0, 0, 1] == 0).all() if zeros else out[0, 0, 1].isnan().all()


def test_windows_and_sinks() -> None:
    q = on_card(1, 2, 6, 4, dtype=torch.float32)
    sinks = on_card(2, dtype=torch.float32, seed=3)
    arguments = (q, q, q, None, 0.0, 0.5, False, True, "None", None, "left", [2, 0], sinks)
    out, m, linv, _ = torch.ops.hpu.sdpa_recomp_fwd(*arguments)
    row, key = torch.arange(6)[:, None], torch.arange(6)
    scores = (q.cpu() @ q.cpu().transpose(-1, -2) * 0.5).masked_fill((key > row) | (key < row - 2), float("-inf"))
    with_sink = torch.cat([scores, sinks.cpu().view(1, 2, 1, 1).expand(1, 2, 6, 1)], -1)
    torch.testing.assert_close(out.cpu(), with_sink.softmax(-1)[..., :6] @ q.cpu())
    torch.testing.assert_close((m - linv.log()).cpu(), with_sink.logsumexp(-1, keepdim=True))


REFUSED_ATTENTION: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "mask and causal": (
        "a mask together with is_causal",
        lambda x: recomputed(x, x, x, x[0, 0] @ x[0, 0].t(), causal=True),
    ),
    "lengths without causal": ("valid_len without is_causal", lambda x: recomputed(x, x, x, valid=lengths())),
    "side": ("padding on side 'up'", lambda x: recomputed(x, x, x, side="up")),
    "dtype of k": ("k is torch.float32", lambda x: recomputed(x, x.float(), x)),
    "float64": ("q is torch.float64", lambda x: recomputed(x.double(), x.double(), x.double())),
    "mode fp32": ("softmax_mode 'fp32' with torch.float32", lambda x: fused(x.float(), softmax_mode="fp32")),
    "unknown mode": ("softmax_mode 'slow'", lambda x: fused(x, softmax_mode="slow")),
    "window without recompute": (
        "without recompute_mode",
        lambda x: fused(x, recompute_mode=False, window_size=(1, 0)),
    ),
    "dropout": ("dropout 0.5", lambda x: fused(x, dropout_p=0.5)),
}


def lengths() -> Tensor:
    return torch.tensor([1], device="hpu")


def fused(x: Tensor, **named: Any) -> Any:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    defaults = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "softmax_mode": "None",
        "recompute_mode": None,
        "valid_seq_len": None,
        "seq_padding_type": "left",
        "return_dropout_mask": False,
        "return_attn_probs": False,
        "window_size": (-1, -1),
        "sink": None,
    }
    assert named.keys() <= defaults.keys()
    return FusedSDPA.apply(x, x, x, *{**defaults, **named}.values())


@pytest.mark.parametrize("name", REFUSED_ATTENTION)
def test_arguments_that_attention_refuses(name: str, forbidden: Any) -> None:
    text, call = REFUSED_ATTENTION[name]
    with forbidden(text):
        call(on_card(1, 2, 3, 4))


def test_the_default_side_of_pads_is_left() -> None:
    x = on_card(1, 1, 4, 8, dtype=torch.float32)
    short = torch.tensor([2], device="hpu")
    assert torch.equal(
        fused(x, is_causal=True, valid_seq_len=short)[:, :, 2:],
        fused(x, is_causal=True, valid_seq_len=short, seq_padding_type="left")[:, :, 2:],
    )


def test_probabilities_are_kept_where_recompute_is_off(card: Any) -> None:
    x = on_card(1, 2, 3, 4, dtype=torch.float32)
    out, probabilities = fused(x, return_attn_probs=True)
    torch.testing.assert_close(probabilities.sum(-1).cpu(), torch.ones(1, 2, 3))
    torch.testing.assert_close(out, probabilities @ x)
    torch.testing.assert_close(out, fused(x, recompute_mode=True))


def test_block_softmax_and_its_adjustment(card: Any, forbidden: Any) -> None:
    """Together they are the softmax over the blocks of each group."""
    scores, groups = on_card(3, 2, 2, 1, 8, dtype=torch.float32), torch.tensor([0, 1, 0], device="hpu")
    exponentials, top, total = torch.ops.hpu.block_softmax(scores, torch.zeros_like(scores), groups)
    assert top.shape == (3, 64)
    shape = [3, 2, 2, 1, 1]
    rescale = torch.ops.hpu.block_softmax_adjustment(top, total, groups, 2, shape)
    found = (exponentials * rescale).cpu()
    together = torch.cat([scores[0], scores[2]], -1).cpu().softmax(-1)
    torch.testing.assert_close(torch.cat([found[0], found[2]], -1), together)
    torch.testing.assert_close(found[1], scores[1].cpu().softmax(-1))
    pads = torch.ops.hpu.block_softmax_adjustment(top, total, torch.tensor([0, 1, -1], device="hpu"), 2, shape)
    assert pads[2].isnan().all(), "nothing is said of blocks that do not count"
    with forbidden("must be 5-dimensional, got 2"):
        torch.ops.hpu.block_softmax_adjustment(top, total, groups, 2)
    with forbidden("4-d scores"):
        torch.ops.hpu.block_softmax(scores[0], scores[0], groups)
    card.device_type = "synDeviceGaudi2"
    with forbidden("needs a Gaudi 3"):
        torch.ops.hpu.block_softmax_adjustment(top, total, groups, 2, shape)


def test_softmax_fa2_of_float32_has_64_in_a_vector() -> None:
    scores = on_card(9, 4, dtype=torch.float32)
    lowest, nothing = torch.full((128,), float("-inf"), device="hpu"), torch.zeros(128, device="hpu")
    _, top, *_ = torch.ops.hpu.softmax_fa2(scores, inputM=lowest, inputL=nothing)
    assert torch.equal(top[:8], scores.amax(-1)[:8])
    assert torch.equal(top[64], scores[8].amax())
    assert top[8:64].isnan().all()


def test_rms_norm(forbidden: Any, card: Any) -> None:
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm
    from habana_frameworks.torch.simulator import duties

    x, gamma = on_card(1, 3, 8), on_card(8, seed=1)
    y, inverse = torch.ops.hpu.rms_norm(x, gamma, 1e-5)
    assert (y.dtype, inverse.dtype, inverse.shape) == (BF16, torch.float32, (1, 3, 1))
    expected = functional.rms_norm(x.cpu().float(), (8,), gamma.cpu().float(), 1e-5)
    assert torch.equal(y.cpu(), expected.to(BF16)), "rounded once"
    assert torch.equal(FusedRMSNorm.apply(x, gamma, 1e-5), y)
    assert duties.count(31) == 0
    FusedRMSNorm.apply(x[0], gamma, 1e-5)
    assert duties.count(31) == 1
    with forbidden("gamma is torch.float32, the input torch.bfloat16"):
        FusedRMSNorm.apply(x, gamma.float(), 1e-5)


@pytest.mark.parametrize("mode", ["BLOCKWISE", "PAIRWISE"])
def test_rotary_embedding(mode: str, forbidden: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingMode, apply_rotary_pos_emb

    x, angle = on_card(5, 2, 8, dtype=torch.float32), torch.rand(5, 1, 4)
    whole = torch.cat([angle, angle], -1) if mode == "BLOCKWISE" else angle.repeat_interleave(2, -1)
    cos, sin = whole.cos().to("hpu"), whole.sin().to("hpu")
    found = apply_rotary_pos_emb(x, cos, sin, None, 0, RotaryPosEmbeddingMode[mode]).cpu()
    host = x.cpu()
    pairs = host.unflatten(-1, (2, 4)).transpose(-1, -2) if mode == "BLOCKWISE" else host.unflatten(-1, (4, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(5, 1, 4), angle))
    expected = turned.transpose(-1, -2).flatten(-2) if mode == "BLOCKWISE" else turned.flatten(-2)
    torch.testing.assert_close(found, expected)
    assert apply_rotary_pos_emb(x.to(BF16), cos, sin).dtype == torch.float32, "one float32 makes all of them"
    assert apply_rotary_pos_emb(x.to(BF16), cos.to(BF16), sin.to(BF16)).dtype == BF16
    with forbidden("sin is 4 wide, the rotated part 8"):
        apply_rotary_pos_emb(x, cos[..., :4], sin[..., :4])
    with forbidden("sin is torch.float32, the input torch.bfloat16"):
        torch.ops.hpu.rotary_pos_embedding(x.to(BF16), sin, cos.to(BF16), None, 0, 0)


@pytest.mark.parametrize(("generation", "top"), [("synDeviceGaudi2", 240.0), ("synDeviceGaudi3", 448.0)])
def test_8_bits_saturate(generation: str, top: float, card: Any) -> None:
    card.device_type = generation
    x = torch.tensor([1.0, -300.0, 1e6, float("nan")]).to("hpu")
    for narrow in (x.to(torch.float8_e4m3fn), torch.ops.hpu.cast_to_fp8_v2(x, dtype=torch.float8_e4m3fn)[0]):
        assert narrow.float().tolist()[:3] == [1.0, max(-top, -288.0), top]
        assert narrow.float()[3].isnan()
    into = torch.zeros(4, dtype=torch.float8_e4m3fn, device="hpu")
    into.copy_(x)
    assert into.float().tolist()[2] == top


def test_casts_multiply_by_their_scale() -> None:
    x = torch.tensor([1.0, 2.0, 3.0]).to("hpu")
    half = torch.tensor(0.5, device="hpu")
    narrow, top = torch.ops.hpu.cast_to_fp8_v2(x, half, False, True, torch.float8_e4m3fn)
    assert narrow.float().tolist() == [0.5, 1.0, 1.5]
    assert top.item() == 3
    assert torch.ops.hpu.cast_from_fp8(narrow, 1 / half, BF16).tolist() == [1, 2, 3]
    assert torch.ops.hpu.cast_from_fp8(narrow, 2.0, BF16).tolist() == [1, 2, 3]
    assert torch.ops.hpu.cast_to_fp8_v2(x, [0.5], dtype=torch.float8_e4m3fn)[1].isnan()


def test_matrix_product_of_8_bits(forbidden: Any) -> None:
    a, b = (torch.randint(-8, 8, shape).float().to("hpu") for shape in ((3, 4), (5, 4)))
    by_row, by_column = torch.tensor([[1.0], [2.0], [4.0]]).to("hpu"), torch.tensor([1.0, 2, 4, 8, 16]).to("hpu")
    narrow = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    found = torch.ops.hpu.fp8_gemm_v2(narrow[0], False, narrow[1], True, None, torch.float32, by_row, by_column)
    assert torch.equal(found, a @ b.t() * by_row * by_column)
    bias = torch.ones(5, device="hpu")
    more = torch.ops.hpu.fp8_gemm_v2(narrow[0], False, narrow[1], True, found, torch.float32, 1.0, 1.0, bias, True)
    assert torch.equal(more, a @ b.t() + 1 + found)
    with forbidden("B is torch.float32"):
        torch.ops.hpu.fp8_gemm_v2(narrow[0], False, b, True, None, torch.float32)


SCHEMAS = {
    "sdpa_recomp_fwd": "default",
    "sdpa_fwd": "default",
    "softmax_fa2": "default",
    "block_softmax": "default",
    "block_softmax_adjustment": "default",
    "rms_norm": "default",
    "rotary_pos_embedding": "default",
    "cast_to_fp8_v2": "default scalar scalar_list",
    "cast_from_fp8": "default scalar scalar_list",
    "fp8_gemm_v2": "default scalar scalar_list",
    "mixture_of_experts": (
        "default fused_weights fp8_fused_weights fp8_fused_weights_dynamic bias_fused_weights mxfp4_fused_weights"
    ),
}


def test_kernels_are_found_by_their_schemas() -> None:
    for name, overloads in SCHEMAS.items():
        packet = getattr(torch.ops.hpu, name)
        assert sorted(packet.overloads()) == sorted(overloads.split())
        for overload in overloads.split():
            assert getattr(packet, overload)._schema.name == f"hpu::{name}"


def test_fused_kernels_are_one_node_of_a_region(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA, apply_rotary_pos_emb
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def layer(x: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = FusedRMSNorm.apply(x, gamma, 1e-5)
        heads = apply_rotary_pos_emb(normed.unflatten(-1, (2, 4)).squeeze(0), cos, sin).transpose(0, 1)[None]
        return FusedSDPA.apply(heads, heads, heads, None, 0.0, True, None, "None", True)

    given = on_card(1, 3, 8), on_card(8), on_card(3, 1, 4), on_card(3, 1, 4, seed=2)
    compiled = torch.compile(layer, backend="hpu_backend", dynamic=False, fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*given), layer(*given))
    assert card.compiled_graphs == 1
