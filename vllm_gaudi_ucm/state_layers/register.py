"""The layers with a state that are served, gated short convolutions among them, and their registration with vLLM."""

from __future__ import annotations

from typing import cast

import torch

from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.state_layers.gated_delta import StatefulGatedDelta
from vllm_gaudi_ucm.state_layers.mamba2 import StatefulMixer2
from vllm_gaudi_ucm.state_layers.state_layer import StateLayer
from vllm_gaudi_ucm.vllm_api.attention import PluggableLayer
from vllm_gaudi_ucm.vllm_api.model import op_registry_oot
from vllm_gaudi_ucm.vllm_api.state_layers import MambaBase, MambaMixer2, QwenGatedDeltaNetAttention, ShortConv


class StatefulShortConv(StateLayer, ShortConv):
    """The layer of LFM2: y = out(c * conv(b * x)) with b, c, x = in(hidden)."""

    def own_state_shapes(self) -> tuple[tuple[int, ...], ...]:
        channels, width = self._weight().shape
        return ((width - 1, channels),)

    def _weight(self) -> torch.Tensor:
        """Returns [channels, width]."""
        return cast("torch.Tensor", self.conv.weight).squeeze(1)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`, [rows, hidden size]."""
        before, behind, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        step, (states,) = self.step_and_states(x)
        x = causal_conv1d(before * x, self._weight(), self.conv.bias, states, step)
        output.copy_(self.out_proj(behind * x)[0])


STATE_LAYERS: dict[type[MambaBase], type[StateLayer]] = {
    MambaMixer2: StatefulMixer2,
    QwenGatedDeltaNetAttention: StatefulGatedDelta,
    ShortConv: StatefulShortConv,
}
"""vLLM's class of each layer, and ours."""


def register_state_layers() -> None:
    """Makes models that are built afterwards in this process use our layers. Safe to call more than once."""
    for layer, ours in STATE_LAYERS.items():
        if layer.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(ours, name=layer.__name__)
