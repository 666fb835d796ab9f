"""Mamba-2 mixers (Granite 4-h, Falcon-H1, Nemotron-H): replaces vLLM's layer in vLLM's models."""

from __future__ import annotations

from typing import Any, cast

import torch

from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.ops.gated_norm.api import gated_norm
from vllm_gaudi_ucm.ops.state_space.api import state_space, time_steps
from vllm_gaudi_ucm.ops.state_space.implementation import SpaceRows
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer
from vllm_gaudi_ucm.vllm_api.state_layers import MambaMixer2


class StatefulMixer2(StateLayer, MambaMixer2):
    """A short convolution and a state-space layer between two projections, with a gated norm.

    Raises:
        UnsupportedFeatureError: the convolution has another activation than SiLU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_silu(self.activation, "Mamba-2 layers")

    def own_state_shapes(self) -> tuple[tuple[int, ...], ...]:
        convolved = (self.conv_kernel_size - 1, self.tped_conv_size)
        return convolved, (self.tped_dt_size, self.head_dim, self.ssm_state_size)

    def forward(self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [rows, hidden size]. mup_vector: factors of the projection's columns (Falcon-H1)."""
        projected = self.in_proj(hidden_states)[0]
        if mup_vector is not None:
            projected = projected * mup_vector
        gate, mixed, dt = projected.split([self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], -1)
        output: torch.Tensor = self.out_proj(self._normed(self._scan(mixed, dt), gate))[0]
        return output

    def _normed(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads * head_dim]. Both tensors have this shape."""
        norm = self.norm
        if not norm.use_rms_norm or (norm.tp_size > 1 and norm.n_groups % norm.tp_size):
            # without a norm, or with one over the heads of several workers
            found: torch.Tensor = norm(x, gate)
            return found
        groups = x.unflatten(-1, (-1, norm.group_size))
        weight = norm.weight.unflatten(0, (-1, norm.group_size))
        return gated_norm(groups, gate.unsqueeze(1), weight, norm.variance_epsilon, gate_first=True).flatten(1)

    def _scan(self, mixed: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads * head_dim]. mixed: inputs of the convolution. dt: before bias and softplus."""
        step, (convolution_states, space_states) = self.step_and_states(mixed)
        weight, bias = cast("torch.Tensor", self.conv1d.weight).squeeze(1), self.conv1d.bias
        mixed = causal_conv1d(mixed, weight, bias, convolution_states, step, silu=True)
        of_groups = (mixed.shape[-1] - self.tped_intermediate_size) // 2
        x, b, c = mixed.split([self.tped_intermediate_size, of_groups, of_groups], -1)
        rows = SpaceRows(
            x=x.unflatten(-1, (-1, self.head_dim)),
            dt=time_steps(dt, self.dt_bias),
            b=b.unflatten(-1, (-1, self.ssm_state_size)),
            c=c.unflatten(-1, (-1, self.ssm_state_size)),
        )
        return state_space(rows, self.A, self.D, space_states, step).flatten(1)
