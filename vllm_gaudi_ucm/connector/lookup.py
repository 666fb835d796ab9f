"""Questions to the store what it holds, asked by a thread of their own: the scheduler never waits for a slow store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.store.base import KvStore

logger = plugin_logger(__name__)


class Lookup:
    """One question; `hits` is how many of its keys the store holds from the first on, None until it is answered.

    records, has_records: other keys, and whether the store holds all of them.
    """

    def __init__(self, keys: Sequence[bytes], first_block: int, asked: float, records: Sequence[bytes] = ()) -> None:
        self.keys = keys
        self.records = records
        self.has_records = False
        self.first_block = first_block
        self.asked = asked
        self.hits: int | None = None
        self.answered = threading.Event()


class LookupThread:
    """Asks one question after the other.

    Args:
        store: may be slow, and may raise: then nothing is there.
        clock: seconds.
    """

    def __init__(self, store: KvStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._questions: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        # daemon: a store that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="ucm-lookup", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[bytes], first_block: int, records: Sequence[bytes] = ()) -> Lookup:
        """keys: of blocks `first_block` and following; records: of their summaries. Returns at once."""
        lookup = Lookup(keys, first_block, self._clock(), records)
        self._questions.put(lookup)
        return lookup

    def age(self, lookup: Lookup) -> float:
        """Seconds since it was asked."""
        return self._clock() - lookup.asked

    def close(self, timeout: float = 1.0) -> None:
        """Ends the thread, or leaves it to the store that it is stuck in."""
        self._questions.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (lookup := self._questions.get()) is not None:
            try:
                found = self._store.lookup([*lookup.keys, *lookup.records])
                found, records = found[: len(lookup.keys)], found[len(lookup.keys) :]
                lookup.has_records = bool(records) and all(records)
                lookup.hits = next((i for i, is_there in enumerate(found) if not is_there), len(found))
            except Exception as error:
                logger.warning("the store cannot say what it holds: %s: %s", type(error).__name__, error)
                lookup.hits = 0
            lookup.answered.set()
