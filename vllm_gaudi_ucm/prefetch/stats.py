"""What the prefetch engine has done since it was made, and what it holds now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority

if TYPE_CHECKING:
    from vllm_gaudi_ucm.prefetch.dispatcher import Dispatcher
    from vllm_gaudi_ucm.prefetch.tasks import PrefetchTask


class PrefetchCounters(msgspec.Struct, kw_only=True):
    """Totals. Blocks: loaded from the store, found in the cache, or shared with a load of another request.

    misses: blocks that the store did not give. errors: stores that raised. deliver_errors: `deliver` raised.
    no_room: blocks for which every slot of the cache was in use. shed: requests beyond `max_pending_prefetch`.
    waits, wait_seconds, wait_timeouts: of callers that waited for a request.
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
    """A copy of the totals; requests by outcome, blocks that wait by priority, and what is held now."""

    outcomes: dict[PrefetchOutcome, int]
    queue_depth: dict[PrefetchPriority, int]
    pending: int
    threads: int
    cache_blocks: int
    cache_bytes: int
    evictions: int


class PrefetchHandle:
    """Speaks of the prefetch that it was returned for, whatever else its request's id stands for later.

    task: the engine's own, to be read under its lock.
    """

    def __init__(self, task: PrefetchTask, dispatcher: Dispatcher) -> None:
        self.task = task
        self._dispatcher = dispatcher

    @property
    def request_id(self) -> str:
        return self.task.request_id

    @property
    def outcome(self) -> PrefetchOutcome | None:
        """None while it is pending. Once there is one, no `deliver` of this prefetch runs or will run."""
        return self._dispatcher.outcome_of(self.task)

    @property
    def failed(self) -> frozenset[int]:
        """Indices of blocks that did not arrive; complete once there is an outcome."""
        return self._dispatcher.failed_of(self.task)

    def wait(self, timeout: float | None = None) -> PrefetchOutcome:
        """The outcome, or TIMEOUT after `timeout` seconds; None waits up to the prefetch's own deadline."""
        return self._dispatcher.wait(self.task, timeout)

    def cancel(self) -> bool:
        """Whether it was pending until now."""
        return self._dispatcher.cancel(self.task)

    def __repr__(self) -> str:
        return f"PrefetchHandle({self.request_id!r}, {self.outcome or 'pending'})"
