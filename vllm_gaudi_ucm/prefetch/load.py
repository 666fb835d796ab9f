"""One block on its way: read from the store once, then handed to everyone who waits for it."""

from __future__ import annotations

from vllm_gaudi_ucm.prefetch.cache import Slot
from vllm_gaudi_ucm.prefetch.task import PrefetchTask


class Load:
    """slot: of the cache, where it is there or is to be kept; None while nobody but `deliver` calls has asked for it.

    cached: it was in host memory already. buffer: its bytes, in the slot or lent by the store; None until it is read,
    and where it could not be. waiters: requests and the block's index in each, the next one first; few.
    """

    __slots__ = ("buffer", "cached", "delivering", "key", "slot", "waiters")

    def __init__(self, key: bytes, slot: Slot | None, cached: bool) -> None:
        self.key = key
        self.slot = slot
        self.cached = cached
        self.buffer: memoryview | None = slot.buffer if slot is not None and cached else None
        self.waiters: list[tuple[PrefetchTask, int]] = []
        self.delivering: tuple[PrefetchTask, int] | None = None
