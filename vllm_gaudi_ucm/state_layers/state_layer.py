"""The part that all layers with a state have in common: how they get their states, and the rows of a step.

Short convolutions are little more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_gaudi_ucm.ops.causal_conv1d.api import causal_conv1d
from vllm_gaudi_ucm.ops.state_rows import StateRows
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.kv_cache import MambaSpec
from vllm_gaudi_ucm.vllm_api.model import get_forward_context
from vllm_gaudi_ucm.vllm_api.state_layers import MambaBase, ShortConv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.groups import GroupStep


class StateLayer(MambaBase):
    """A layer of vLLM whose states are tensors of their own, with a row for each state.

    kv_cache: the tensors, [rows, *shape] for each shape of `own_state_shapes`.
    """

    kv_cache: tuple[torch.Tensor, ...]
    _group: GroupStep

    def need_silu(self, activation: str, layers: str) -> None:
        """Refuses a convolution with another activation than SiLU. layers: what the error calls them."""
        if activation not in ("silu", "swish"):
            raise UnsupportedFeatureError(f"the activation {activation} in {layers}", "the model")

    def own_state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each tensor of a state, as our operations read it."""
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """Returns what the layer keeps. vLLM gives it no blocks, so the block size has no effect."""
        return MambaSpec(
            block_size=vllm_config.cache_config.block_size,
            shapes=self.own_state_shapes(),
            dtypes=tuple(self.get_state_dtype()),
        )

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """Takes a tuple of tensors. vLLM's own layers get one tensor, and cut their states out of it."""
        self.kv_cache = kv_cache

    def join(self, group: GroupStep | None) -> None:
        """Makes the layer read the step of its group."""
        if group is None:
            raise UnsupportedFeatureError("a model whose layers all keep a state", "the model")
        self._group = group

    def step_and_states(self, rows: torch.Tensor) -> tuple[StateRows, tuple[torch.Tensor, ...]]:
        """Returns the rows of the running step, and the states of all slots.

        A memory measurement has no requests. It computes all rows as one prompt, with states of its own.
        rows: [rows, ...], anything of the step.
        """
        if get_forward_context().attn_metadata is not None:
            return cast("StateRows", self._group.metadata), self.kv_cache
        kinds = zip(self.own_state_shapes(), self.get_state_dtype(), strict=True)
        states = tuple(torch.zeros((3, *shape), dtype=dtype, device=rows.device) for shape, dtype in kinds)
        return StateRows.of_one_prompt(len(rows), rows.device), states


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
