"""The interface of an implementation of the KV-cache operations, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor


class KvCacheImplementation(Implementation[None], ABC):
    """Writes new tokens and copies blocks. A method returns False for tensors that it leaves to the reference."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> bool:
        """Like `write_kv`, with validated tensors, in place."""

    def write_rows(self, tokens: Tensor, rows: Tensor, slots: Tensor) -> bool:
        """Like the operation `write_rows`, with validated tensors, in place: as keys and values that are its halves."""
        half = rows.shape[-1] // 2
        if not half:
            return False
        return self.write(tokens[..., :half], tokens[..., half:], rows[..., :half], rows[..., half:], slots)

    @abstractmethod
    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        """Like `swap_blocks`, with validated caches; pairs: int64 [n, 2], contiguous."""


KV_CACHE: Implementations[KvCacheImplementation] = Implementations(
    "kv_cache",
    "vllm_gaudi_ucm.kv_cache_implementations",
    reference="vllm_gaudi_ucm.ops.kv_cache.impl.reference:ReferenceKvCache",
    native="vllm_gaudi_ucm.ops.kv_cache.impl.cpu.native:NativeKvCache",
    cuda="vllm_gaudi_ucm.ops.kv_cache.impl.cuda.cache:CudaKvCache",
)
