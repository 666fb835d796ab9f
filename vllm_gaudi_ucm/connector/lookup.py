"""Looks up keys in the store in a separate thread, so the scheduler never waits for a slow store."""

import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import KvStore
from vllm_gaudi_ucm.store.shards import ShardLookups

logger = plugin_logger(__name__)


# A store in memory answers within this time; with a slower one, requests are retried in the next step.
GRACE_SECONDS = 0.002


SAVES_SECONDS = 0.1
"""The longest time that a request waits for blocks on their way to the store, if steps are short."""
LEAST_ASKED = 3
"""The least number of times that such blocks are looked up again: a long step stores them after the first answer."""
AGAIN_SECONDS = 0.001
"""The time between two look-ups of such blocks."""


class Lookup:
    """One look-up; `hits` is how many of its first keys the store holds, None until it is answered.

    records, has_records: other keys, and whether the store holds all of them. is_wanted: not dropped.
    is_late: it was too old when its turn came, and has no answer. again_until, asked_again: for blocks on their way to
    the store it is made again, until this time and at least LEAST_ASKED times; how often it was.
    """

    def __init__(self, keys: Sequence[bytes], first_block: int, asked: float, records: Sequence[bytes] = ()) -> None:
        self.keys = keys
        self.records = records
        self.has_records = False
        self.first_block = first_block
        self.asked = asked
        self.hits: int | None = None
        self.is_wanted = True
        self.is_late = False
        self.again_until: float | None = None
        self.asked_again = 0
        self.answered = threading.Event()

    def drop(self) -> None:
        """Drops the look-up: its answer is not needed any more."""
        self.is_wanted = False

    @property
    def is_open(self) -> bool:
        return self.hits is None and not self.is_late


class LookupThread:
    """Makes one look-up after the other; dropped ones are skipped.

    Args:
        store: may be slow, and may raise: then it counts as empty.
        deadline: seconds after which a look-up is not made any more.
    """

    def __init__(
        self, store: KvStore | ShardLookups, deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._deadline = deadline
        self._clock = clock
        self._grace = GRACE_SECONDS
        self._questions: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        # daemon: a store that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="ucm-lookup", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[bytes], first_block: int, records: Sequence[bytes] = ()) -> Lookup:
        """Queues a look-up and returns at once. keys: blocks from `first_block` on; records: keys of summaries."""
        lookup = Lookup(keys, first_block, self._clock(), records)
        self._questions.put(lookup)
        return lookup

    def ask_again(self, lookup: Lookup) -> bool:
        """Queues an answered look-up once more. Returns False if it was asked often enough: its answer stays."""
        now = self._clock()
        if lookup.again_until is None:
            lookup.again_until = now + SAVES_SECONDS
        elif now >= lookup.again_until and lookup.asked_again >= LEAST_ASKED:
            return False
        lookup.asked_again += 1
        lookup.hits, lookup.has_records, lookup.asked = None, False, now
        lookup.answered.clear()
        self._questions.put(lookup)
        return True

    def is_answered(self, lookup: Lookup) -> bool:
        """Waits for the rest of a step's grace period, which all look-ups share. True if answered."""
        if lookup.is_open and self._grace > 0:
            begin = self._clock()
            lookup.answered.wait(self._grace)
            self._grace -= self._clock() - begin
        return lookup.hits is not None

    def end_step(self) -> None:
        """Ends a step: the next one has a grace period of its own."""
        self._grace = GRACE_SECONDS

    def is_late(self, lookup: Lookup) -> bool:
        return self._clock() - lookup.asked >= self._deadline

    def close(self, timeout: float = 1.0) -> None:
        """Ends the thread, or leaves it to the store that it is stuck in."""
        self._questions.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (lookup := self._questions.get()) is not None:
            if not lookup.is_wanted:
                continue
            if self.is_late(lookup):
                lookup.is_late = True
                lookup.answered.set()
                continue
            if lookup.again_until is not None:
                time.sleep(AGAIN_SECONDS)
            try:
                found = self._store.lookup([*lookup.keys, *lookup.records])
                found, records = found[: len(lookup.keys)], found[len(lookup.keys) :]
                lookup.has_records = bool(records) and all(records)
                lookup.hits = next((i for i, is_there in enumerate(found) if not is_there), len(found))
            except Exception as error:
                logger.warning("the store cannot be searched: %s: %s", type(error).__name__, error)
                lookup.hits = 0
            lookup.answered.set()


MOST_KEYS = 200_000  # 32 bytes each, plus Python's overhead: some 40 MB
SAVE_SECONDS = 5.0
"""The longest time from a block's copy on the device until the store finds it."""


class KnownKeys:
    """The last keys that were sent or found, up to a number; forgetting one costs an unnecessary save."""

    def __init__(self, most: int = MOST_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._keys: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def sent(self, keys: Iterable[bytes]) -> None:
        """Adds keys of blocks that are sent to the store now."""
        self._add(keys, self._clock())

    def found(self, keys: Iterable[bytes]) -> None:
        """Adds keys that the store holds."""
        self._add(keys, -math.inf)

    def _add(self, keys: Iterable[bytes], sent: float) -> None:
        for key in keys:
            self._keys[key] = sent
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def is_in_transit(self, key: bytes) -> bool:
        """Returns whether a block was sent lately, so that the store may not hold it yet."""
        return self._keys.get(key, -math.inf) > self._clock() - SAVE_SECONDS

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def missed(self, keys: Iterable[bytes]) -> None:
        """Forgets keys that the store does not hold, unless they may still be in transit to it."""
        self.discard([key for key in keys if not self.is_in_transit(key)])

    def clear(self) -> None:
        self._keys.clear()
