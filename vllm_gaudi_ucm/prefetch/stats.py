"""Totals of the prefetch engine since it was made, and its current content."""

import msgspec

from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority


class PrefetchCounters(msgspec.Struct, kw_only=True):
    """Totals. Blocks: loaded from the store, found in the cache, or shared with a load of another request.

    misses: blocks that the store did not have. errors: stores that raised. deliver_errors: `deliver` raised.
    no_room: blocks for which every slot of the cache was in use. shed: requests beyond `max_pending_prefetch`.
    waits, wait_seconds, wait_timeouts: totals of callers that waited for a request.
    """

    submitted: int = 0
    blocks_loaded: int = 0
    blocks_cached: int = 0
    blocks_shared: int = 0
    misses: int = 0
    errors: int = 0
    deliver_errors: int = 0
    no_room: int = 0
    shed: int = 0
    waits: int = 0
    wait_timeouts: int = 0
    wait_seconds: float = 0.0
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    threads_replaced: int = 0


class PrefetchStats(PrefetchCounters, kw_only=True):
    """A copy of the totals; requests by outcome, waiting blocks by priority, and the current content."""

    outcomes: dict[PrefetchOutcome, int]
    queue_depth: dict[PrefetchPriority, int]
    pending: int
    threads: int
    cache_blocks: int
    cache_bytes: int
    evictions: int
