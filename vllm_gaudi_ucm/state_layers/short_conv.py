"""Gated short convolutions (LFM2): replaces vLLM's layer in vLLM's models."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer
from vllm_gaudi_ucm.vllm_api.state_layers import ShortConv


class StatefulShortConv(StateLayer, ShortConv):  # type: ignore[misc]  # vLLM's class is not typed
    """y = out(c * conv(b * x)) with b, c, x = in(hidden)."""

    def own_state_shapes(self) -> tuple[tuple[int, ...], ...]:
        weight = self.conv.weight
        return ((weight.shape[-1] - 1, weight.shape[0]),)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`, [rows, hidden size]."""
        before, behind, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        x, step = before * x, self.rows_of_step()
        if step is not None:
            (states,) = self.kv_cache
            x = causal_conv1d(x, self.conv.weight.squeeze(1), self.conv.bias, states, step)
        output.copy_(self.out_proj(behind * x)[0])
