"""Decoder layers of the Llama kind whose steps of few rows take two native calls around vLLM's attention layer.

Only layers that consist of exactly the classes named here are changed, and only their instances: whatever another
model, a quantisation or a wrapper puts in their place computes as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from vllm_gaudi_ucm.layers.rms_norm import FusedRMSNorm
from vllm_gaudi_ucm.layers.rotary_embedding import StepRotaryEmbedding
from vllm_gaudi_ucm.layers.silu_and_mul import FusedSiluAndMul
from vllm_gaudi_ucm.ops.decoder_layer.api import DecoderHalves, DecoderWeights, Linear, Norm, fits
from vllm_gaudi_ucm.runner.packed_weights import PackedLinearMethod

_LINEARS = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)


class FewRowsForward:
    """Stands in for the `forward` of one decoder layer; steps that it does not cover take the original one."""

    def __init__(self, layer: Any, weights: DecoderWeights) -> None:
        self._original = layer.forward
        self._attention = layer.self_attn.attn
        self._split = [layer.self_attn.q_size, layer.self_attn.kv_size, layer.self_attn.kv_size]
        self._halves = DecoderHalves(weights)

    def __call__(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        halves = self._halves
        if residual is None or torch.compiler.is_compiling() or not halves.covers(hidden_states, residual, positions):
            return self._original(positions, hidden_states, residual)
        query, key, value = halves.before_attention(hidden_states, residual, positions).split(self._split, -1)
        return halves.after_attention(self._attention(query, key, value), residual), residual


def fuse_decoder_layers(model: nn.Module) -> int:
    """Gives every layer that fits its `FewRowsForward`; after the linear layers were packed. Returns how many."""
    count = 0
    for layer in model.modules():
        if type(layer) is not LlamaDecoderLayer or not _is_plain(layer):
            continue
        weights = _weights(layer)
        if fits(weights):
            layer.forward = FewRowsForward(layer, weights)  # type: ignore[method-assign]
            count += 1
    return count


def _is_plain(layer: Any) -> bool:
    """Whether every part is of the class that the native halves compute; layers come with parts of any class."""
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not LlamaAttention or type(attention.attn) is not Attention or type(mlp) is not LlamaMLP:
        return False
    rotary: Any = attention.rotary_emb
    return (
        type(rotary) is StepRotaryEmbedding
        and rotary.is_neox_style
        and rotary.head_size == attention.head_dim
        and type(mlp.act_fn) is FusedSiluAndMul
        and all(_is_plain_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and all(_is_plain_linear(linear) for linear in _linears(layer))
    )


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is FusedRMSNorm and norm.variance_size_override is None


def _is_plain_linear(linear: Any) -> bool:
    return (
        type(linear) in _LINEARS
        and type(linear.quant_method) is PackedLinearMethod
        and linear.tp_size == 1
        and not linear.skip_bias_add
    )


def _linears(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _weights(layer: Any) -> DecoderWeights:
    attention = layer.self_attn
    qkv, attention_out, gate_up, down = (Linear(part.quant_method.weight, part.bias) for part in _linears(layer))
    input_norm, output_norm = (_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    return DecoderWeights(
        input_norm=input_norm,
        qkv=qkv,
        attention_out=attention_out,
        output_norm=output_norm,
        gate_up=gate_up,
        down=down,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_size=attention.head_dim,
        angles=attention.rotary_emb.cos_sin_cache,
    )


def _norm(norm: FusedRMSNorm) -> Norm:
    return Norm(norm.weight.data if norm.pass_weight_add else None, norm.variance_epsilon)
