"""Gated delta nets (Qwen3-Next, Qwen3.5): replaces vLLM's layer in vLLM's models."""

from __future__ import annotations

from typing import Any, cast

import torch

from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.ops.gated_delta.api import delta_gates, gated_delta
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.gated_norm.api import gated_norm
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer
from vllm_gaudi_ucm.vllm_api.state_layers import QwenGatedDeltaNetAttention


class StatefulGatedDelta(StateLayer, QwenGatedDeltaNetAttention):
    """A short convolution and the gated delta rule between two projections, with a gated norm.

    Raises:
        UnsupportedFeatureError: the convolution has another activation than SiLU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_silu(self.activation, "gated delta nets")

    def own_state_shapes(self) -> tuple[tuple[int, ...], ...]:
        convolved = (self.conv_kernel_size - 1, self.conv_dim // self.tp_size)
        return convolved, (self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns [rows, hidden size]."""
        projected, gates = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.gqa_interleaved_layout:
            mixed, z, b, a = self._by_key_head(projected, gates)
        else:
            mixed, z = projected.split([self.conv_dim // self.tp_size, self.value_dim // self.tp_size], -1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = (each.unsqueeze(1) for each in self.split_ba(gates))
        output: torch.Tensor = self.out_proj(self._normed(self._scan(mixed, b, a), z).flatten(1))[0]
        return output

    def _by_key_head(self, projected: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns inputs of the convolution, [rows, channels], and, as views, z, b and a, [rows, key heads, ...].

        The projections have q, k, v and z of each key head together, and so b and a.
        """
        heads, repeats = self.num_k_heads // self.tp_size, self.num_v_heads // self.num_k_heads
        values = repeats * self.head_v_dim
        sizes = [self.head_k_dim, self.head_k_dim, values, values]
        *parts, z = projected.unflatten(-1, (heads, -1)).split(sizes, -1)
        mixed = torch.cat([part.flatten(1) for part in parts], -1)
        b, a = gates.unflatten(-1, (heads, -1)).split([repeats, repeats], -1)
        return mixed, z, b, a

    def _normed(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads, value_dim]. gate: [rows, *, *]."""
        if self.norm.activation not in ("silu", "swish"):
            normed: torch.Tensor = self.norm(x, gate.reshape(x.shape))
            return normed
        return gated_norm(x, gate, self.norm.weight, self.norm.eps, gate_first=False)

    def _scan(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads, value_dim]. mixed: inputs of the convolution. b, a: before sigmoid and softplus,
        [rows, *, *].
        """
        step, (convolution_states, states) = self.step_and_states(mixed)
        weight = cast("torch.Tensor", self.conv1d.weight).squeeze(1)
        mixed = causal_conv1d(mixed, weight, None, convolution_states, step, silu=True)
        of_keys = self.key_dim // self.tp_size
        q, k, v = mixed.split([of_keys, of_keys, mixed.shape[-1] - 2 * of_keys], -1)
        log_decay, beta = delta_gates(a, b, self.A_log, self.dt_bias)
        rows = DeltaRows(
            q=q.unflatten(-1, (-1, self.head_k_dim)),
            k=k.unflatten(-1, (-1, self.head_k_dim)),
            v=v.unflatten(-1, (-1, self.head_v_dim)),
            log_decay=log_decay,
            beta=beta,
        )
        return gated_delta(rows, states, step)
