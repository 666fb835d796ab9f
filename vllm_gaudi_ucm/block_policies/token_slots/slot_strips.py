"""Gives strips of slots to requests, and limits how scattered a prefix that others have computed may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.block_policies.token_slots.free_strips import FreeStrips

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_gaudi_ucm.vllm_api.scheduling import BlockPool, KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request


class StripSizes:
    """The sizes that a server's buckets hold.

    Args:
        tile: slots that attention reads as a block.
        strip: slots of a strip; tiles are made of strips.
        max_model_len: the most tokens of a request.
        most_ranges: the most ranges of a context.
    """

    def __init__(self, tile: int, strip: int, max_model_len: int, most_ranges: int) -> None:
        self.tile, self.strip = tile, strip
        self.max_model_len, self.most_ranges = max_model_len, most_ranges

    def longest_hit(self, slots: Sequence[KVCacheBlock]) -> int:
        """Returns how many of the first `slots` a request may share, so that its context has at most `most_ranges`
        ranges, however it continues: each strip of its own is one more.
        """
        ids = np.fromiter((block.block_id for block in slots), np.int64, len(slots))
        begins = np.diff(ids, prepend=-1) != 1
        begins |= (ids - 1) % self.tile == 0
        own = -(-(self.max_model_len - np.arange(1, len(ids) + 1)) // self.strip) + 1
        fits = np.flatnonzero(begins.cumsum() + own <= self.most_ranges)
        return int(fits[-1]) + 1 if len(fits) else 0


class SlotStrips:
    """Gives slots to the requests of a manager whose blocks are slots.

    A request that finds too few empty strips waits, or preempts others, as if there were too few blocks. If no other
    request has any slot, the slots that it has found in the prefix cache are scattered so that too few strips remain:
    then it computes those tokens again, and everything fits.

    Args:
        pool: vLLM's block pool.
        sizes: the sizes of the server.
        evict: takes slots, by id, out of the prefix cache.
    """

    def __init__(self, pool: BlockPool, sizes: StripSizes, evict: Callable[[set[int]], None]) -> None:
        queue = pool.free_block_queue
        self.free = FreeStrips(pool.blocks, queue.popleft_n(queue.num_free_blocks), sizes.strip, evict)
        self._sizes = sizes
        self._without_hits: set[str] = set()

    def longest_hit(self, request: Request, slots: Sequence[KVCacheBlock]) -> int:
        """Returns how many of the slots that the prefix cache has for a request it may get."""
        return 0 if request.request_id in self._without_hits else self._sizes.longest_hit(slots)

    def reserve(self, request: Request, held: Sequence[KVCacheBlock], num_tokens: int, begins: bool) -> bool:
        """Chooses the slots for the first `num_tokens` tokens of a request; returns whether there are enough.

        held: the request's slots; for a request that begins, those that the prefix cache has for it.
        """
        last = held[-1].block_id if held else 0
        # a step without drafts does not need the slots of rejected drafts
        count = max(0, min(num_tokens, self._sizes.max_model_len) - len(held))
        is_alone = begins and self.free.num_free_blocks == self.free.num_slots
        expected = request.num_tokens - len(held)
        is_there = self.free.reserve(request.request_id, last, count, expected, held if begins else ())
        if not is_there and is_alone:
            self._without_hits.add(request.request_id)
        return is_there

    def given(self, request: Request) -> None:
        """Called when a request has the slots that were chosen."""
        self._without_hits.discard(request.request_id)

    def not_given(self, request: Request, held: Sequence[KVCacheBlock]) -> None:
        """Called when a request gets no slots. held: its slots; empty for one that would have begun."""
        self.free.cancel(request.request_id, held[-1].block_id if held else 0)

    def leaves(self, request: Request) -> None:
        """Called when a request has ended, has never begun, or is preempted."""
        self.free.release(request.request_id)
        self._without_hits.discard(request.request_id)
