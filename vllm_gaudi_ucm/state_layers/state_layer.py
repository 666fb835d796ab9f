"""The part that all layers with a state have in common: how they get their states, and the rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm_gaudi_ucm.ops.state_rows import StateRows
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.model import get_forward_context
from vllm_gaudi_ucm.vllm_api.state_layers import MambaBase, MambaSpec

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.groups import GroupStep


class StateLayer(MambaBase):
    """A layer of vLLM whose states are tensors of their own, with a row for each state.

    kv_cache: the tensors, [rows, *shape] for each shape of `own_state_shapes`.
    """

    kv_cache: tuple[torch.Tensor, ...]
    _group: GroupStep

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

    def rows_of_step(self) -> StateRows | None:
        """Returns the rows of the running step; None in a memory measurement, which keeps no states."""
        if get_forward_context().attn_metadata is None:
            return None
        return cast("StateRows", self._group.metadata)
