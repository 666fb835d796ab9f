"""The prefetch of one request: which of its blocks have arrived, which failed, which are still to be dispatched."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, StrEnum

from vllm_gaudi_ucm.prefetch.cache import HostCache, Slot

HIGH_POSITIONS = 4
NORMAL_POSITIONS = 16


class PrefetchPriority(IntEnum):
    """A priority; smaller values come first: URGENT is about to run, HIGH in the next batch, LOW speculative."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @classmethod
    def compute_priority(cls, queue_position: int) -> PrefetchPriority:
        """Returns the priority at a position of the queue; 0 is the request that runs, or runs next."""
        if queue_position <= 0:
            return cls.URGENT
        if queue_position <= HIGH_POSITIONS:
            return cls.HIGH
        if queue_position <= NORMAL_POSITIONS:
            return cls.NORMAL
        return cls.LOW


class PrefetchOutcome(StrEnum):
    """The outcome. Only READY means that every block arrived; after any other outcome the caller runs without the
    blocks.

    FAILED: some blocks could not be loaded or delivered, or the request was refused. TIMEOUT: its deadline, or the
    caller's, passed first. CANCELLED: by the caller, or by a stop. UNKNOWN: no such request, or forgotten.
    """

    READY = "ready"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


Deliver = Callable[[int, memoryview], None]
"""Called in a thread of the engine with a block's index in the request and its bytes, valid during the call only."""

WAITING, DONE, LOST = 0, 1, 2


class PrefetchTask:
    """State of a request in the engine; touched only under the dispatcher's lock.

    cursor: blocks [0, cursor) have been dispatched. delivering: calls of `deliver` that run now. settling: the outcome,
    which is final once no such call runs any more. pins: cache slots kept until the outcome is final. held: slots whose
    memory a caller was given.
    """

    __slots__ = (
        "cursor",
        "deliver",
        "delivering",
        "expires",
        "forgotten",
        "held",
        "keys",
        "outcome",
        "pins",
        "priority",
        "remaining",
        "request_id",
        "sequence",
        "settling",
        "states",
        "submitted",
    )

    def __init__(
        self,
        request_id: str,
        keys: Sequence[bytes],
        priority: PrefetchPriority,
        deliver: Deliver | None,
        submitted: float,
        expires: float,
        sequence: int,
    ) -> None:
        self.request_id = request_id
        self.keys = tuple(keys)
        self.priority = priority
        self.deliver = deliver
        self.submitted = submitted
        self.expires = expires
        self.sequence = sequence
        self.cursor = 0
        self.states = bytearray(len(self.keys))
        self.remaining = len(self.keys)
        self.delivering = 0
        self.settling: PrefetchOutcome | None = None
        self.outcome: PrefetchOutcome | None = None
        self.forgotten = False
        self.pins: list[Slot] = []
        self.held: list[Slot] = []

    @property
    def is_open(self) -> bool:
        return self.settling is None

    @property
    def queued(self) -> int:
        """The number of blocks that no thread has taken yet."""
        return len(self.keys) - self.cursor if self.is_open else 0

    def mark(self, index: int, state: int) -> None:
        """Marks a waiting block as arrived (DONE) or not (LOST); does nothing if the request is settled already."""
        if self.is_open and self.states[index] == WAITING:
            self.states[index] = state
            self.remaining -= 1

    def settle(self, outcome: PrefetchOutcome) -> None:
        """Gives up the blocks that are still waiting."""
        self.settling = outcome
        self.remaining = 0
        self.states = self.states.replace(bytes([WAITING]), bytes([LOST]))

    def hold(self, slots: list[Slot]) -> None:
        """Gives a caller the memory of these slots, which are in use from now on."""
        self.held = slots

    def move(self, priority: PrefetchPriority) -> None:
        """Changes the priority of blocks not dispatched yet."""
        self.priority = priority

    def forget(self) -> None:
        """Forgets the outcome."""
        self.forgotten = True

    def failed(self) -> frozenset[int]:
        """The indices of the blocks that did not arrive."""
        return frozenset(index for index, state in enumerate(self.states) if state == LOST)


class TaskQueue:
    """A heap over `submitted + priority * ageing`, then the sequence number; tasks themselves are never compared.

    A task that waits rises by one priority every `ageing` seconds. All tasks rise at the same speed, so their order
    does not change with time: a rank is computed once. Entries that were moved or removed stay until they reach the
    front.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._heap: list[tuple[float, int, PrefetchTask]] = []
        self._ranks: dict[int, tuple[float, PrefetchTask]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, task: PrefetchTask) -> bool:
        return task.sequence in self._ranks

    def put(self, task: PrefetchTask) -> None:
        """Adds a task, or moves it to the place of its current priority."""
        rank = task.submitted + task.priority * self._ageing
        self._ranks[task.sequence] = (rank, task)
        heapq.heappush(self._heap, (rank, task.sequence, task))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, sequence, task) for sequence, (rank, task) in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, task: PrefetchTask) -> None:
        """Removes a task; does nothing if it is not in the queue."""
        self._ranks.pop(task.sequence, None)

    def first(self) -> PrefetchTask | None:
        """Returns the most urgent task without removing it; None if the queue is empty."""
        while self._heap:
            rank, sequence, task = self._heap[0]
            if self._ranks.get(sequence, (None,))[0] == rank:
                return task
            heapq.heappop(self._heap)
        return None

    def depths(self) -> Counter[PrefetchPriority]:
        """Returns the blocks that wait for a thread, by the priority of their request."""
        found: Counter[PrefetchPriority] = Counter()
        for _, task in self._ranks.values():
            found[task.priority] += task.queued
        return found

    def tasks(self) -> list[PrefetchTask]:
        return [task for _, task in self._ranks.values()]


class Load:
    """A block being loaded. slot: its slot of the cache, if it is or will be kept there; None while only `deliver`
        calls need it.

    cached: it was in host memory already. buffer: its bytes, in the slot or lent by the store; None until it is read,
    or if it could not be read. waiters: requests and the block's index in each, the next one first; few.
    """

    __slots__ = ("buffer", "cached", "delivering", "key", "slot", "waiters")

    def __init__(self, key: bytes, slot: Slot | None, cached: bool) -> None:
        self.key = key
        self.slot = slot
        self.cached = cached
        self.buffer: memoryview | None = slot.buffer if slot is not None and cached else None
        self.waiters: list[tuple[PrefetchTask, int]] = []
        self.delivering: tuple[PrefetchTask, int] | None = None

    def fill(self, buffer: memoryview | None) -> None:
        """Sets the block's bytes; None if it could not be read."""
        self.buffer = buffer

    def use(self, slot: Slot | None) -> None:
        """Takes a slot of the cache for the block; None if that has no room."""
        self.slot = slot

    def begin_delivery(self, task: PrefetchTask, index: int) -> None:
        self.delivering = task, index

    def end_delivery(self) -> tuple[PrefetchTask, int] | None:
        """Ends a call of `deliver`, and returns it, if one was made."""
        ended, self.delivering = self.delivering, None
        return ended


KEPT_OUTCOMES = 1024


class Ledger:
    """Tasks by id. Not thread-safe: the dispatcher's lock is held around every call.

    An id stands for its newest task. Replaced tasks whose `deliver` still runs are counted in `delivering` until it has
    returned.
    """

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._pending: dict[str, PrefetchTask] = {}
        self._complete: OrderedDict[str, PrefetchTask] = OrderedDict()
        self.delivering: Counter[str] = Counter()
        self.outcomes: Counter[PrefetchOutcome] = Counter()
        self.replaced = 0

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, request_id: str) -> PrefetchTask | None:
        return self._pending.get(request_id) or self._complete.get(request_id)

    def pending(self) -> list[PrefetchTask]:
        return list(self._pending.values())

    def complete(self) -> Iterator[PrefetchTask]:
        return iter(self._complete.values())

    def add(self, task: PrefetchTask) -> None:
        """Adds a task under an id that is free, or belongs to a settled task."""
        if self._pending.pop(task.request_id, None) is not None:
            self.replaced += 1
        self.forget(task.request_id)
        self._pending[task.request_id] = task

    def finish(self, task: PrefetchTask, outcome: PrefetchOutcome) -> None:
        """Makes the task's outcome final; the oldest outcomes are forgotten, unless a caller uses their memory."""
        task.outcome = outcome
        self.outcomes[outcome] += 1
        self.drop_pins(task)
        if self._pending.get(task.request_id) is task:
            del self._pending[task.request_id]
            if not task.forgotten:
                self._complete[task.request_id] = task
        elif self.replaced:
            self.replaced -= 1
        while len(self._complete) > KEPT_OUTCOMES:
            oldest = next((name for name, kept in self._complete.items() if not kept.held), None)
            if oldest is None:
                break
            del self._complete[oldest]

    def end_delivery(self, request_id: str) -> bool:
        """Notes that one `deliver` of the id has returned; True if none runs any more."""
        self.delivering[request_id] -= 1
        if self.delivering[request_id]:
            return False
        del self.delivering[request_id]
        return True

    def forget(self, request_id: str) -> None:
        """Drops the outcome; memory that was given to a caller may now be used for other blocks."""
        task = self._complete.pop(request_id, None)
        if task is not None:
            for slot in task.held:
                self._cache.release(slot)
            task.held.clear()

    def drop_pins(self, task: PrefetchTask) -> None:
        for slot in task.pins:
            self._cache.release(slot)
        task.pins.clear()
