"""Plans which requests to prefetch for, and how urgently, from their places in the queue. Source: seed 000, 5.1."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from vllm_gaudi_ucm.prefetch.tasks import PrefetchPriority

HISTORY_WEIGHT = 0.5
OLDEST_WEIGHT, NEWEST_WEIGHT = 0.1, 1.0


class AccessHistory:
    """Counts of accesses by key that lose half of their weight every `half_life` steps; at most `capacity` keys.

    The key that was accessed least recently goes first. Not thread-safe.
    """

    def __init__(self, capacity: int, half_life: float = 256.0) -> None:
        if capacity < 1 or half_life <= 0:
            raise ValueError(f"found capacity {capacity} and half_life {half_life}, expected more than 0 of both")
        self._capacity = capacity
        self._half_life = half_life
        self._counts: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._step = 0

    def __len__(self) -> int:
        return len(self._counts)

    def advance(self, steps: int = 1) -> None:
        self._step += steps

    def record(self, keys: Iterable[bytes]) -> None:
        """Records blocks that a request uses now, one access each."""
        for key in keys:
            self._counts[key] = (self.count(key) + 1.0, self._step)
            self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, key: bytes) -> float:
        """Returns the accesses of a block, decayed up to now."""
        count, step = self._counts.get(key, (0.0, self._step))
        return count * 0.5 ** ((self._step - step) / self._half_life)

    def order(self, keys: Sequence[bytes], sinks: int = 1) -> list[int]:
        """Returns the indices of a request's blocks, the one to prefetch first at the front.

        The first `sinks` blocks are attended whatever the query is. The others come by half of their accesses and
        their position, newer ones before older ones; equal ones stay in the order of the context.
        """
        step = (NEWEST_WEIGHT - OLDEST_WEIGHT) / max(len(keys) - 1, 1)
        scores = [HISTORY_WEIGHT * self.count(key) + OLDEST_WEIGHT + step * at for at, key in enumerate(keys)]
        return sorted(range(len(keys)), key=lambda at: (at >= sinks, -scores[at] if at >= sinks else at))


class QueuedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request and the keys of the blocks that it will load from the store, in the order of its context."""

    request_id: str
    keys: tuple[bytes, ...]


class PlannedPrefetch(msgspec.Struct, frozen=True, array_like=True):
    """A request's blocks, the first to be loaded at the front."""

    request_id: str
    keys: tuple[bytes, ...]
    priority: PrefetchPriority


class PrefetchPlan(msgspec.Struct, frozen=True, array_like=True):
    """Changes since the last plan: new prefetches, other priorities, and requests that no longer wait."""

    submit: tuple[PlannedPrefetch, ...] = ()
    move: tuple[tuple[str, PrefetchPriority], ...] = ()
    cancel: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.submit or self.move or self.cancel)


Order = Callable[[QueuedRequest], Sequence[bytes]]
"""Returns the keys of a request, the one to prefetch first at the front."""


def plan_prefetch(
    running: Sequence[QueuedRequest],
    waiting: Sequence[QueuedRequest],
    batch_size: int,
    batches_ahead: int,
    max_blocks: int,
    order: Order,
) -> list[PlannedPrefetch]:
    """Returns the prefetches that should be pending or complete now, the most urgent first.

    Args:
        running: requests of the running batch that need blocks; position 0 of the queue.
        waiting: requests by their place in the queue, from position 1 on.
        batch_size: requests of a batch. Requests of the next `batches_ahead` batches are prefetched for.
        max_blocks: distinct blocks of the plan; the request that reaches it is cut, and those behind it wait.
    """
    planned: list[PlannedPrefetch] = []
    seen: set[bytes] = set()
    places = [(0, request) for request in running] if batches_ahead else []
    places += list(enumerate(waiting[: batch_size * batches_ahead], start=1))
    for position, request in places:
        if len(seen) >= max_blocks:
            break
        taken: list[bytes] = []
        for key in order(request):
            if key not in seen:
                if len(seen) >= max_blocks:
                    continue
                seen.add(key)
            taken.append(key)
        if taken:
            priority = PrefetchPriority.compute_priority(position)
            planned.append(PlannedPrefetch(request.request_id, tuple(taken), priority))
    return planned


class PrefetchPlanner:
    """Follows the queue: prefetches move with it, and end with their request. Not thread-safe.

    A step with an unchanged queue costs a comparison; history is read once for each request.
    """

    def __init__(self, batch_size: int, batches_ahead: int, max_blocks: int, history: AccessHistory) -> None:
        self.look_ahead = batch_size * batches_ahead
        """Waiting requests that a plan considers."""
        self.history = history
        self._batch_size = batch_size
        self._batches_ahead = batches_ahead
        self._max_blocks = max_blocks
        self._planned: dict[str, PlannedPrefetch] = {}
        self._orders: dict[str, tuple[tuple[bytes, ...], list[bytes]]] = {}
        self._queue: tuple[list[QueuedRequest], list[QueuedRequest]] = ([], [])

    def update(self, running: Sequence[QueuedRequest], waiting: Sequence[QueuedRequest]) -> PrefetchPlan:
        """Returns the changes that make the prefetches fit this queue. Called once per step."""
        self.history.advance()
        queue = list(running), list(waiting)
        if queue == self._queue:
            return PrefetchPlan()
        self._queue = queue
        before = self._planned
        target = plan_prefetch(
            running, waiting, self._batch_size, self._batches_ahead, self._max_blocks, self._order_once
        )
        self._planned = {prefetch.request_id: prefetch for prefetch in target}
        self._orders = {name: order for name, order in self._orders.items() if name in self._planned}
        return PrefetchPlan(
            tuple(new for name, new in self._planned.items() if name not in before or before[name].keys != new.keys),
            tuple(
                (name, new.priority)
                for name, new in self._planned.items()
                if name in before and before[name].keys == new.keys and before[name].priority is not new.priority
            ),
            tuple(name for name in before if name not in self._planned),
        )

    def _order_once(self, request: QueuedRequest) -> Sequence[bytes]:
        """Orders blocks by history when the request enters the look-ahead; a changing order would load some twice."""
        keys, ordered = self._orders.get(request.request_id, ((), []))
        if keys != request.keys:
            ordered = [request.keys[at] for at in self.history.order(request.keys)]
            self._orders[request.request_id] = request.keys, ordered
        return ordered
