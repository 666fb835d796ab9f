"""The queue of free blocks, which decides which block is given away next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock


class FreeBlocks(FreeKVCacheBlockQueue):
    """A version of vLLM's queue that reports blocks that are given away, and gives away useful blocks last."""

    _is_of_use: Callable[[KVCacheBlock], bool]
    _reused: Callable[[Iterable[KVCacheBlock]], None]

    @classmethod
    def of(
        cls,
        queue: FreeKVCacheBlockQueue,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> Self:
        """Returns a replacement for a queue, which must not be used any more.

        is_of_use: returns whether a block that is not in the prefix cache is useful. reused: called with blocks that
        are given away.
        """
        made = cls.__new__(cls)
        made.__dict__.update(queue.__dict__)
        made._is_of_use, made._reused = is_of_use, reused
        return made

    def popleft(self) -> KVCacheBlock:
        block = super().popleft()
        self._reused([block])
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks = super().popleft_n(n)
        self._reused(blocks)
        return blocks

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Prepends blocks that are not in the prefix cache; those that are of use are appended instead."""
        super().prepend_n([block for block in blocks if not self._is_of_use(block)])
        self.append_n([block for block in blocks if self._is_of_use(block)])
