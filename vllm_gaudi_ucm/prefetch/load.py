"""One block on its way: read from the store once, then handed to everyone who waits for it."""

from __future__ import annotations

from collections import deque

from vllm_gaudi_ucm.prefetch.cache import Slot
from vllm_gaudi_ucm.prefetch.task import PrefetchTask


class Load:
    """slot: where it is read to; None if the cache had no room, so that only `deliver` calls can use it.

    cached: it was in host memory already. waiters: requests and the block's index in each.
    """

    __slots__ = ("cached", "delivering", "key", "slot", "waiters")

    def __init__(self, key: bytes, slot: Slot | None, cached: bool) -> None:
        self.key = key
        self.slot = slot
        self.cached = cached
        self.waiters: deque[tuple[PrefetchTask, int]] = deque()
        self.delivering: tuple[PrefetchTask, int] | None = None
