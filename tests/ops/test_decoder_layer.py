"""The halves of a decoder layer give the bits of the operations that they are made of."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi_ucm.ops.decoder_layer.api import DecoderHalves, DecoderWeights, Linear, Norm, fits
from vllm_gaudi_ucm.ops.packed_linear.api import NATIVE_ROWS, pack, packed_linear
from vllm_gaudi_ucm.ops.rms_norm.api import rms_norm
from vllm_gaudi_ucm.ops.rotary.api import rotate
from vllm_gaudi_ucm.ops.silu_and_mul.api import silu_and_mul

SIZE, HEADS, KV_HEADS, HEAD, INNER, POSITIONS = 128, 3, 1, 64, 192, 40
pytestmark = pytest.mark.skipif(
    pack(torch.randn(64, 16)).panels is None, reason="oneDNN packs in a format of its own here, or no native kernels"
)


def linear(outputs: int, inputs: int, bias: bool) -> Linear:
    return Linear(pack(torch.randn(outputs, inputs) / inputs**0.5), torch.randn(outputs) if bias else None)


def make_weights(bias: bool = False, rotary_size: int = HEAD) -> DecoderWeights:
    torch.manual_seed(0)
    turns = torch.rand(POSITIONS, rotary_size // 2) * 7
    return DecoderWeights(
        Norm(torch.randn(SIZE), 1e-5),
        linear((HEADS + 2 * KV_HEADS) * HEAD, SIZE, bias),
        linear(SIZE, HEADS * HEAD, bias),
        Norm(None if bias else torch.randn(SIZE), 1e-6),
        linear(2 * INNER, SIZE, bias),
        linear(SIZE, INNER, bias),
        HEADS,
        KV_HEADS,
        HEAD,
        torch.cat((turns.cos(), turns.sin()), 1),
    )


@pytest.mark.parametrize("rows", [0, 1, 17, NATIVE_ROWS])
@pytest.mark.parametrize(("bias", "rotary_size"), [(False, HEAD), (True, HEAD // 2)])
def test_same_bits_as_its_parts(rows: int, bias: bool, rotary_size: int) -> None:
    weights = make_weights(bias, rotary_size)
    halves = DecoderHalves(weights)
    hidden, residual = torch.randn(rows, SIZE), torch.randn(rows, 2 * SIZE)[:, :SIZE]
    positions, attention = torch.randint(0, POSITIONS, (rows,)), torch.randn(rows, HEADS * HEAD)
    sums = residual.clone()
    qkv = packed_linear(rms_norm(hidden.clone(), weights.input_norm.weight, 1e-5, sums), *weights.qkv)
    rotate(*qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)[:2], positions, weights.angles, HEAD)
    assert halves.covers(hidden, residual, positions)
    assert torch.equal(halves.before_attention(hidden, residual, positions), qkv)
    assert torch.equal(residual, sums)

    projected = packed_linear(attention, *weights.attention_out)
    gates = packed_linear(rms_norm(projected, weights.output_norm.weight, 1e-6, sums), *weights.gate_up)
    assert torch.equal(halves.after_attention(attention, residual), packed_linear(silu_and_mul(gates), *weights.down))
    assert torch.equal(residual, sums)


def test_a_position_without_angles_is_named() -> None:
    """covers: A10."""
    halves = DecoderHalves(make_weights())
    with pytest.raises(IndexError, match=f"row 1 has position {POSITIONS}, expected one from 0 to {POSITIONS - 1}"):
        halves.before_attention(torch.randn(2, SIZE), torch.randn(2, SIZE), torch.tensor([0, POSITIONS]))


def test_what_it_does_not_cover() -> None:
    halves = DecoderHalves(make_weights())
    few, many = torch.randn(2, SIZE), torch.randn(NATIVE_ROWS + 1, SIZE)
    positions = torch.arange(2)
    assert halves.covers(few, few, positions)
    assert not halves.covers(many, many, torch.arange(NATIVE_ROWS + 1) % POSITIONS)
    assert not halves.covers(few[:, :64], few[:, :64], positions)
    assert not halves.covers(few.bfloat16(), few.bfloat16(), positions)
    assert not halves.covers(few, few, positions.int())
    assert not halves.covers(few, few, positions.expand(3, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"heads": HEADS + 1},
        {"head_size": 2 * HEAD},
        {"down": linear(SIZE, INNER + 16, False)},
        {"attention_out": linear(SIZE + 64, HEADS * HEAD, False)},
        {"qkv": Linear(make_weights().qkv.weight, torch.randn(3))},
        {"gate_up": Linear(make_weights().gate_up.weight._replace(panels=None), None)},
        {"input_norm": Norm(torch.randn(SIZE).bfloat16(), 1e-5)},
        {"angles": torch.randn(POSITIONS, HEAD).bfloat16()},
        {"angles": torch.randn(POSITIONS, 2 * HEAD)},
    ],
)
def test_weights_that_do_not_fit_together(change: dict[str, object]) -> None:
    """Nothing is read from beyond a tensor."""
    assert fits(make_weights())
    assert not fits(make_weights()._replace(**change))  # type: ignore[arg-type]
