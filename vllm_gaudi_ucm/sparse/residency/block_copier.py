"""Copies of whole blocks, all layers of one behind the other, between the KV cache and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BlockCopier:
    """Shapes do not depend on the block, so that a device that compiles by shape compiles twice in all.

    Args:
        kv_caches: [blocks, kv heads, block size, k | v] of each layer, of one dtype and device.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        (self._dtype,) = {cache.dtype for cache in kv_caches}
        (self._device,) = {cache.device for cache in kv_caches}
        self._caches = list(kv_caches)
        self._sizes = [cache[0].numel() for cache in kv_caches]
        self.block_bytes = sum(self._sizes) * self._dtype.itemsize

    def read(self, block: int) -> torch.Tensor:
        """uint8 [block_bytes] in host memory."""
        index = torch.tensor([block], device=self._device)
        layers = [cache.index_select(0, index).reshape(-1) for cache in self._caches]
        return torch.cat(layers).cpu().view(torch.uint8)

    def write(self, block: int, data: torch.Tensor) -> None:
        """data: uint8 [block_bytes] in host memory, as `read` returned it."""
        index = torch.tensor([block], device=self._device)
        layers = data.view(self._dtype).to(self._device).split(self._sizes)
        for cache, layer in zip(self._caches, layers, strict=True):
            cache.index_copy_(0, index, layer.view(1, *cache.shape[1:]))
