"""Scales of a KV cache of 8-bit floats: attention is computed in the cache's units, so that no kernel knows of scales.

What is cached is key / k and value / v. New tokens are divided alike, the query is multiplied by k, and the result by
v: scores and weights are those of the unscaled tensors. A latent is a part of its key, so it has the scale of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.attention import AttentionLayer


class CacheScales(NamedTuple):
    """Of a layer, one number each, in the dtype of its rows; tensors, or each layer would be a graph of its own."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, layer: AttentionLayer, dtype: torch.dtype) -> CacheScales:
        """[1, 1] or [kv_heads, 1], from the checkpoint, or 1."""
        return cls(layer._k_scale.to(dtype).reshape(-1, 1), layer._v_scale.to(dtype).reshape(-1, 1))

    @classmethod
    def of_latents(cls, layer: Any, dtype: torch.dtype) -> CacheScales:
        """[1, 1] twice, for latent and rotary key alike, as vLLM's backends have it. layer: has `_k_scale`."""
        scale = layer._k_scale.to(dtype).reshape(1, 1)
        return cls(scale, scale)

    def divide(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [rows, heads, dim] in units of the cache."""
        return _by_group(query, key.shape[1], self.key), key / self.key, value / self.value

    def restore(self, out: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """The result in the model's units, in place."""
        return out.copy_(_by_group(out, kv_heads, self.value))


def _by_group(rows: torch.Tensor, kv_heads: int, scale: torch.Tensor) -> torch.Tensor:
    """Each query head times the scale of the head of keys that it reads."""
    return (rows.unflatten(1, (kv_heads, -1)) * scale.unsqueeze(-1)).flatten(1, 2)
