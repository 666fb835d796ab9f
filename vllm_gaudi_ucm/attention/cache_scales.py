"""Scales of a KV cache of 8-bit floats: attention is computed in the cache's units, so kernels need no scales.

The cache holds key / k and value / v. New tokens are divided in the same way, the query is multiplied by k, and the
result by v: scores and weights equal those of the unscaled tensors. A latent is part of its key, so it has the scale of
keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.attention import AttentionLayer


class CacheScales(NamedTuple):
    """The scales of a layer in the dtype of its rows; tensors, because a number would compile each layer again."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def from_layer(cls, layer: AttentionLayer, dtype: torch.dtype) -> CacheScales:
        """Returns scales [1, 1] or [kv_heads, 1] from the checkpoint; 1 if it has none."""
        return cls(layer._k_scale.to(dtype).reshape(-1, 1), layer._v_scale.to(dtype).reshape(-1, 1))

    @classmethod
    def of_latents(cls, layer: Any, dtype: torch.dtype) -> CacheScales:
        """Returns one scale [1, 1] for latent and rotary key, as in vLLM's backends. layer: has `_k_scale`."""
        scale = layer._k_scale.to(dtype).reshape(1, 1)
        return cls(scale, scale)

    def divide(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Converts rows [rows, heads, dim] to units of the cache."""
        return _by_group(query, key.shape[1], self.key), key / self.key, value / self.value

    def restore(self, out: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Converts the result to the model's units, in place."""
        return out.copy_(_by_group(out, kv_heads, self.value))


def _by_group(rows: torch.Tensor, kv_heads: int, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies each query head by the scale of the key head that it reads."""
    return (rows.unflatten(1, (kv_heads, -1)) * scale.unsqueeze(-1)).flatten(1, 2)
