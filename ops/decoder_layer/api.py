"""The two halves of a decoder layer around its attention as one native call each, for a few rows on a CPU.

Why: a decode step is bound by reading the weights, and what stands beside that is calls: of 52 ms a step of one row of
SmolLM2-135M, 10 were Python between some 20 calls per layer. Both halves are compositions of operations that exist
alone (`ops/rms_norm`, `ops/packed_linear`, `ops/rotary`, `ops/silu_and_mul`) and give the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native
from vllm_gaudi_ucm.ops.native.tensor import is_rows
from vllm_gaudi_ucm.ops.packed_linear.api import NATIVE_ROWS, PackedWeight


class Linear(NamedTuple):
    """A packed weight and its fp32 bias."""

    weight: PackedWeight
    bias: Tensor | None


class Norm(NamedTuple):
    """RMSNorm's fp32 weight, or None for ones, and its epsilon."""

    weight: Tensor | None
    epsilon: float


class DecoderWeights(NamedTuple):
    """A decoder layer of the Llama kind. angles: fp32 [positions, rotary size], cosines before sines (NeoX style)."""

    input_norm: Norm
    qkv: Linear
    attention_out: Linear
    output_norm: Norm
    gate_up: Linear
    down: Linear
    heads: int
    kv_heads: int
    head_size: int
    angles: Tensor


class _Weight(ctypes.Structure):
    """`Weight` of source/decoder_layer.cpp."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("width", c_int64),
    )


class _Layer(ctypes.Structure):
    """`Layer` of source/decoder_layer.cpp."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("output_norm", c_void_p),
        ("input_eps", c_float),
        ("output_eps", c_float),
        ("qkv", _Weight),
        ("attention_out", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("angles", c_void_p),
        ("max_position", c_int64),
        ("rotary_size", c_int64),
    )


class DecoderHalves:
    """Both halves of one layer. `weights` must fit together (`fits`), and must not move while this object lives."""

    def __init__(self, weights: DecoderWeights) -> None:
        kernels = native()
        assert kernels is not None, "fits said no"
        self._weights = weights
        self._before, self._after = kernels.ucm_before_attention, kernels.ucm_after_attention
        self._layer = _describe(weights)
        self._address = ctypes.addressof(self._layer)

    def covers(self, hidden: Tensor, residual: Tensor, positions: Tensor) -> bool:
        """Whether both halves compute this step: few fp32 rows of the right size, int64 positions."""
        rows, size = hidden.shape[0], self._weights.qkv.weight.inputs
        return (
            rows <= NATIVE_ROWS
            and hidden.shape == residual.shape == (rows, size)
            and is_rows(hidden)
            and is_rows(residual)
            and positions.dtype == torch.int64
            and positions.shape == (rows,)
            and positions.is_contiguous()
        )

    def before_attention(self, hidden: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        """Adds hidden to residual in place; the rotated [rows, (heads + 2 kv_heads) * head size] of the sum's norm.

        Raises IndexError for a position that has no angles.
        """
        rows = hidden.shape[0]
        qkv = torch.empty((rows, self._weights.qkv.weight.outputs))
        row = self._before(
            self._address,
            hidden.data_ptr(),
            hidden.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            positions.data_ptr(),
            rows,
            qkv.data_ptr(),
        )
        if row >= 0:
            raise IndexError(
                f"before_attention: row {row} has position {int(positions[row])}, "
                f"expected one from 0 to {self._weights.angles.shape[0] - 1}"
            )
        return qkv

    def after_attention(self, attention: Tensor, residual: Tensor) -> Tensor:
        """Adds the projected attention [rows, heads * head size] to residual in place; the sum's feed-forward network.

        attention: fp32 with dense rows.
        """
        rows = attention.shape[0]
        out = torch.empty((rows, self._weights.down.weight.outputs))
        self._after(
            self._address,
            attention.data_ptr(),
            attention.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            rows,
            out.data_ptr(),
        )
        return out


def fits(weights: DecoderWeights) -> bool:
    """Whether the weights are such that the native kernels are there and can compute with them."""
    linears = (weights.qkv, weights.attention_out, weights.gate_up, weights.down)
    if native() is None or any(linear.weight.panels is None for linear in linears):
        return False
    qkv, attention_out, gate_up, down = (linear.weight for linear in linears)
    size, wide = qkv.inputs, weights.heads * weights.head_size
    vectors = [(linear.bias, linear.weight.outputs) for linear in linears]
    vectors += [(norm.weight, size) for norm in (weights.input_norm, weights.output_norm)]
    return (
        qkv.outputs == wide + 2 * weights.kv_heads * weights.head_size
        and (attention_out.inputs, attention_out.outputs) == (wide, size)
        and (gate_up.inputs, gate_up.outputs) == (size, 2 * down.inputs)
        and down.outputs == size
        and all(vector is None or _is_vector(vector, length) for vector, length in vectors)
        and is_rows(weights.angles)
        and weights.angles.is_contiguous()
        and weights.angles.shape[1] <= weights.head_size
    )


def _is_vector(x: Tensor, size: int) -> bool:
    return x.dtype == torch.float32 and x.shape == (size,) and x.is_contiguous() and x.is_cpu


def _describe(weights: DecoderWeights) -> _Layer:
    return _Layer(
        _pointer(weights.input_norm.weight),
        _pointer(weights.output_norm.weight),
        weights.input_norm.epsilon,
        weights.output_norm.epsilon,
        *(_weight(linear) for linear in (weights.qkv, weights.attention_out, weights.gate_up, weights.down)),
        weights.heads,
        weights.kv_heads,
        weights.head_size,
        weights.angles.data_ptr(),
        weights.angles.shape[0],
        weights.angles.shape[1],
    )


def _weight(linear: Linear) -> _Weight:
    weight, panels = linear.weight, linear.weight.panels
    assert panels is not None, "fits said no"
    return _Weight(panels.address, _pointer(linear.bias), weight.inputs, weight.outputs, panels.width)


def _pointer(vector: Tensor | None) -> int | None:
    return None if vector is None else vector.data_ptr()
