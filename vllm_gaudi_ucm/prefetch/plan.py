"""Which requests to prefetch for, and how urgently, from their places in the queue. Source: seed 000, 5.1."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_gaudi_ucm.prefetch.history import AccessHistory
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority


class QueuedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request and the keys of the blocks that it will want from the store, in the order of its context."""

    request_id: str
    keys: tuple[bytes, ...]


class PlannedPrefetch(msgspec.Struct, frozen=True, array_like=True):
    """A request's blocks, the first to be loaded at the front."""

    request_id: str
    keys: tuple[bytes, ...]
    priority: PrefetchPriority


class PrefetchPlan(msgspec.Struct, frozen=True, array_like=True):
    """What changed since the last plan: new prefetches, other priorities, and requests that no longer wait."""

    submit: tuple[PlannedPrefetch, ...] = ()
    move: tuple[tuple[str, PrefetchPriority], ...] = ()
    cancel: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.submit or self.move or self.cancel)


def plan_prefetch(
    running: Sequence[QueuedRequest],
    waiting: Sequence[QueuedRequest],
    batch_size: int,
    batches_ahead: int,
    max_blocks: int,
    history: AccessHistory,
) -> list[PlannedPrefetch]:
    """The prefetches that should be there now, the most urgent first.

    Args:
        running: requests of the running batch that want blocks; position 0 of the queue.
        waiting: requests by their place in the queue, from position 1 on.
        batch_size: requests of a batch. Those of the next `batches_ahead` batches are prefetched for.
        max_blocks: distinct blocks of the plan; the request that reaches it is cut by `history`, later ones wait.
    """
    planned: list[PlannedPrefetch] = []
    seen: set[bytes] = set()
    places = [(0, request) for request in running] if batches_ahead else []
    places += list(enumerate(waiting[: batch_size * batches_ahead], start=1))
    for position, request in places:
        keys = [request.keys[at] for at in history.order(request.keys)]
        left = max_blocks - len(seen)
        taken: list[bytes] = []
        for key in keys:
            if key not in seen:
                if not left:
                    continue
                left -= 1
                seen.add(key)
            taken.append(key)
        if taken:
            priority = PrefetchPriority.compute_priority(position)
            planned.append(PlannedPrefetch(request.request_id, tuple(taken), priority))
    return planned


class PrefetchPlanner:
    """Follows the queue: what it asked for, moves with it, and leaves with its request. Not thread-safe."""

    def __init__(self, batch_size: int, batches_ahead: int, max_blocks: int, history: AccessHistory) -> None:
        self._batch_size = batch_size
        self._batches_ahead = batches_ahead
        self._max_blocks = max_blocks
        self._history = history
        self._planned: dict[str, PlannedPrefetch] = {}

    @property
    def look_ahead(self) -> int:
        """Waiting requests that a plan can reach."""
        return self._batch_size * self._batches_ahead

    def update(self, running: Sequence[QueuedRequest], waiting: Sequence[QueuedRequest]) -> PrefetchPlan:
        """What is to be done so that the prefetches are those of this queue.

        A request that was planned keeps its blocks while it is in reach, unless its keys themselves are others now.
        """
        self._history.advance()
        target = plan_prefetch(running, waiting, self._batch_size, self._batches_ahead, self._max_blocks, self._history)
        submit: list[PlannedPrefetch] = []
        move: list[tuple[str, PrefetchPriority]] = []
        planned: dict[str, PlannedPrefetch] = {}
        for prefetch in target:
            before = self._planned.pop(prefetch.request_id, None)
            if before is None or not set(before.keys) >= set(prefetch.keys):
                submit.append(prefetch)
                planned[prefetch.request_id] = prefetch
                continue
            if before.priority is not prefetch.priority:
                move.append((prefetch.request_id, prefetch.priority))
            planned[prefetch.request_id] = msgspec.structs.replace(before, priority=prefetch.priority)
        cancel, self._planned = tuple(self._planned), planned
        return PrefetchPlan(tuple(submit), tuple(move), cancel)
