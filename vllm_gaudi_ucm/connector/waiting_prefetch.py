"""Brings blocks of waiting requests from the store to host memory, in the order of the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.lookup import Lookup, LookupThread
from vllm_gaudi_ucm.prefetch.plan import AccessHistory, PrefetchPlan, PrefetchPlanner, QueuedRequest

if TYPE_CHECKING:
    from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
    from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
    from vllm_gaudi_ucm.vllm_api.steps import Request

# Look-ups of requests at the front of the queue go through the same thread.
OPEN_LOOKUPS = 4
KEYS_OF_HISTORY_PER_BLOCK = 16
_PREFIX = "waiting "

WantedKeys = Callable[["Request"], "list[bytes] | None"]
"""Returns the keys of the blocks that a request will load; None if it will not load any."""


class WaitingPrefetch:
    """Finds in the scheduler which of the waiting requests have blocks in the store, and what to prefetch of them.

    Args:
        options: prefetch_ahead and prefetch_cache_size.
        lookups: asks the store, without waiting here.
        keys: keys of a request.
        part: the part of them that is loaded, if the store has all.
    """

    def __init__(
        self,
        options: PrefetchOptions,
        batch_size: int,
        lookups: LookupThread,
        keys: WantedKeys,
        part: Callable[[Request, Sequence[bytes]], Sequence[bytes]] = lambda request, keys: keys,
    ) -> None:
        history = AccessHistory(KEYS_OF_HISTORY_PER_BLOCK * options.prefetch_cache_size)
        self._planner = PrefetchPlanner(batch_size, options.prefetch_ahead, options.prefetch_cache_size, history)
        self._lookups = lookups
        self._keys = keys
        self._part = part
        self._asked: dict[str, Lookup | None] = {}
        self._queued: dict[str, QueuedRequest] = {}

    def used(self, keys: Iterable[bytes]) -> None:
        """Adds blocks that a request is given now to the history."""
        self._planner.history.record(keys)

    def order(self, keys: Sequence[bytes]) -> list[int]:
        """Returns indices of blocks, by the history of their use and by position."""
        return self._planner.history.order(keys, sinks=0)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has blocks now, or has ended: its id may be reused."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.drop()
        self._queued.pop(request_id, None)

    def plan(self, waiting: Iterable[Request]) -> PrefetchPlan:
        """Plans prefetches. waiting: requests that wait for blocks of their own, the next one first."""
        reach = list(islice(waiting, self._planner.look_ahead))
        names = {request.request_id for request in reach}
        for gone in self._asked.keys() - names:
            self.forget(gone)
        open_lookups = sum(asked is not None and asked.is_open for asked in self._asked.values())
        for request in reach:
            name = request.request_id
            asked = self._asked.get(name)
            is_new = name not in self._asked or (asked is not None and asked.is_late)
            if is_new and open_lookups < OPEN_LOOKUPS:
                asked = self._ask(request)
                open_lookups += 1
            if name not in self._queued and asked is not None and asked.hits:
                stored = asked.keys[: asked.hits]
                part = self._part(request, stored) if len(stored) == len(asked.keys) else stored
                self._queued[name] = QueuedRequest(name, tuple(part))
        return self._planner.update([], [self._queued[r.request_id] for r in reach if r.request_id in self._queued])

    def _ask(self, request: Request) -> Lookup | None:
        keys = self._keys(request)
        asked = self._asked[request.request_id] = self._lookups.ask(keys, 0) if keys else None
        return asked

    @property
    def num_requests(self) -> int:
        return len(self._asked)


def apply_plan(engine: PrefetchEngine, plan: PrefetchPlan) -> None:
    """Applies a plan in the worker. Loads into device blocks have other ids, and find these blocks in the cache."""
    for request_id in plan.cancel:
        engine.forget(_PREFIX + request_id)
    for request_id, priority in plan.move:
        engine.reprioritise(_PREFIX + request_id, priority)
    for prefetch in plan.submit:
        engine.submit_prefetch(_PREFIX + prefetch.request_id, prefetch.keys, prefetch.priority)
