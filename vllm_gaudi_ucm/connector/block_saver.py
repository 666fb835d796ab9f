"""Saves blocks: copied from the device at once, stored by threads of their own."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_ucm.device.step_activity import StepActivity
from vllm_gaudi_ucm.kv_cache.device_blocks import NO_MEMORY, DeviceBlocks
from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.metadata import BlockSave
    from vllm_gaudi_ucm.store.base import KvStore

AT_START = 1 << 30
"""Most bytes for blocks in transit that are taken at start; the others follow as they are needed."""
POLL_SECONDS = 0.02
"""How often one thread checks whether the engine has become idle. Each check takes about 0.1 ms of a step."""


@dataclass(frozen=True)
class QueuedSave:
    """A block or a record, the bytes to store, and the time when it was queued."""

    key: bytes
    buffer: memoryview
    is_block: bool
    queued: float


@dataclass(frozen=True)
class QueuedUse:
    """Blocks of a request that has ended, in their order, which count as used once its saves are stored."""

    keys: Sequence[bytes]
    queued: float


class SaveQueue:
    """A first-in, first-out queue. Its entries are handed out once the engine is idle, and otherwise only

    * after `patience` seconds,
    * after `hurry`, if they were queued before it,
    * while more than half of the capacity is taken, or the step that runs fills more blocks than there is room for, or
    * while a caller waits in `flush`.

    Args:
        capacity: most blocks that are queued or being stored.
        patience: seconds; 0: entries do not wait.
        activity: activity of the engine.
    """

    def __init__(
        self,
        capacity: int,
        patience: float,
        activity: StepActivity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._patience = patience
        self._activity = activity
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for threads that store
        self._settled = threading.Condition(self._lock)  # for callers of `flush`
        self._waiting: deque[QueuedSave | QueuedUse] = deque()
        self._taken = 0
        self._expected = 0
        self._flushing = 0
        self._hurried = -math.inf
        self._is_closed = self._has_watcher = False

    @property
    def capacity(self) -> int:
        """The most blocks that have a place here."""
        return self._capacity

    @property
    def taken(self) -> int:
        """The blocks that have a place here: reserved, queued, or being stored."""
        return self._taken

    def expect(self, count: int) -> None:
        """Announces that the next step fills `count` blocks."""
        with self._lock:
            self._expected = count
            if self._waiting and self._is_due():
                self._changed.notify()

    def hurry(self) -> None:
        """Hands out what is queued now: a request waits for it."""
        with self._lock:
            self._hurried = self._clock()
            self._changed.notify()

    def reserve(self, count: int) -> int:
        """Reserves places for up to `count` blocks; returns how many."""
        with self._lock:
            count = min(count, self._capacity - self._taken)
            self._taken += count
            return count

    def put(self, blocks: Sequence[tuple[bytes, memoryview, bool]]) -> None:
        """Queues blocks that have a place: (key, bytes, whether it is a block)."""
        with self._lock:
            now = self._clock()
            self._waiting += [QueuedSave(*block, queued=now) for block in blocks]
            self._expected = 0
            if blocks:
                self._changed.notify()

    def put_use(self, keys: Sequence[bytes]) -> None:
        """Queues the use of blocks, behind all saves; not if there is no place for it."""
        if self.reserve(1):
            with self._lock:
                self._waiting.append(QueuedUse(keys, self._clock()))
                self._changed.notify()

    def take_save(self) -> QueuedSave | QueuedUse | None:
        """Waits for the next entry that is due; None once the queue is closed and empty."""
        with self._lock:
            while not self._waiting or not self._is_due():
                if not self._waiting and self._is_closed:
                    return None
                self._wait()
            save = self._waiting.popleft()
            if self._waiting:
                self._changed.notify()  # another thread takes the next one, to store or to watch
            return save

    def release(self) -> None:
        """Frees the place of a block that was taken, stored or not."""
        with self._lock:
            self._taken -= 1
            self._settled.notify_all()

    def flush(self, timeout: float) -> bool:
        """Stores everything, and waits for it; False after `timeout` seconds."""
        with self._lock:
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._settled.wait_for(lambda: not self._taken, timeout)
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Closes the queue: entries no longer wait, and threads end once it is empty."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Checks conservation: a place is free or taken, and every queued entry has one. Raises RuntimeError."""
        with self._lock:
            if not len(self._waiting) <= self._taken <= self._capacity:
                raise RuntimeError(
                    f"block saver: {self._taken} of {self._capacity} places taken, {len(self._waiting)} blocks queued"
                )

    def _wait(self) -> None:
        """Waits, with the lock held. One thread watches the engine and wakes the next; no other wakes needlessly."""
        if not self._waiting or self._has_watcher:
            self._changed.wait()
            return
        self._has_watcher = True
        try:
            self._changed.wait(POLL_SECONDS)
        finally:
            self._has_watcher = False

    def _is_due(self) -> bool:
        """True if the first block of the queue is due, with the lock held."""
        return (
            bool(self._flushing)
            or self._is_closed
            or 2 * self._taken > self._capacity
            or self._capacity - self._taken < self._expected
            or self._waiting[0].queued <= self._hurried
            or self._clock() - self._waiting[0].queued >= self._patience
            or self._activity.is_idle()
        )


logger = plugin_logger(__name__)


class SaveCounts(msgspec.Struct, kw_only=True):
    """Blocks: stored, dropped because the queue was full, refused by the store. Records: stored."""

    saved: int = 0
    dropped: int = 0
    refused: int = 0
    records: int = 0


class BlockSaver:
    """Threads that empty a queue between the step and the store; the step never waits for the store.

    Args:
        store: may be slow, and may raise: then the block is not stored.
        waiting: bounds the blocks in host memory, and decides when they are stored.
    """

    def __init__(self, store: KvStore, blocks: DeviceBlocks, waiting: SaveQueue, workers: int) -> None:
        self._store = store
        self._blocks = blocks
        self._queue = waiting
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        if blocks.device.pins_host_memory:
            # page-locked memory takes milliseconds a block, and launches of kernels wait for it
            self._free = self._take(min(waiting.capacity, AT_START // blocks.block_bytes))
            for _ in self._free:
                waiting.release()
        self._unsaved: list[bytes] = []
        self._counts = SaveCounts()
        # daemon: a store that hangs must not keep the process from ending
        self._threads = [
            threading.Thread(target=self._run, name=f"ucm-save-{index}", daemon=True) for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, count: int) -> None:
        """Announces that the next step fills `count` blocks, which need room at its end."""
        self._queue.expect(count)

    def hurry(self) -> None:
        """Stores the blocks that were submitted so far, without waiting for an idle engine."""
        self._queue.hurry()

    def submit(self, saves: Sequence[BlockSave]) -> None:
        """Copies these blocks, which may then be overwritten; blocks beyond the queue's room are dropped."""
        buffers = self._take(len(saves))
        kept, dropped = saves[: len(buffers)], saves[len(buffers) :]
        with self._given_back_on_error(buffers):
            self._blocks.read([(save.block_id, buffer) for save, buffer in zip(kept, buffers, strict=True)])
        with self._lock:
            self._counts.dropped += len(dropped)
            self._unsaved += [save.key for save in dropped]
        self._queue.put([(save.key, buffer, True) for save, buffer in zip(kept, buffers, strict=True)])

    def submit_record(self, key: bytes, fill: Callable[[memoryview], None]) -> None:
        """Stores a record of the size of a block; fill: writes it, at once."""
        buffers = self._take(1)
        if not buffers:
            self.refuse(key)
            return
        with self._given_back_on_error(buffers):
            fill(buffers[0])
        self._queue.put([(key, buffers[0], False)])

    def submit_use(self, keys: Sequence[bytes]) -> None:
        """Has the store count these blocks as used, the last one first, once all saves so far are stored."""
        self._queue.put_use(keys)

    def refuse(self, key: bytes) -> None:
        """Notes a record that is not stored: `take_unsaved` returns it."""
        with self._lock:
            self._unsaved.append(key)

    def take_unsaved(self) -> list[bytes]:
        """Returns the keys of blocks that were dropped or refused since the last call."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, []
        return unsaved

    def counts(self) -> SaveCounts:
        with self._lock:
            return msgspec.structs.replace(self._counts)

    def flush(self, timeout: float) -> bool:
        """Waits until no block is in transit; False after `timeout` seconds."""
        return self._queue.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Stores blocks in transit, and ends the threads; threads stuck in the store are abandoned."""
        end = time.monotonic() + timeout
        if not self.flush(timeout):
            logger.warning("%d blocks were not stored: the store took longer than %.0f s", self._queue.taken, timeout)
        self._queue.close()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def check_integrity(self) -> None:
        self._queue.check_integrity()

    def _take(self, count: int) -> list[memoryview]:
        """Takes buffers that are free, or that there is room for."""
        count = self._queue.reserve(count)
        with self._lock:
            buffers = [self._free.pop() for _ in range(min(count, len(self._free)))]
        try:
            while len(buffers) < count:
                buffers.append(self._blocks.allocate(self._blocks.block_bytes))
        except NO_MEMORY as error:
            logger.warning("no host memory for %d blocks in transit to the store: %s", count - len(buffers), error)
            for _ in range(count - len(buffers)):
                self._queue.release()
        return buffers

    @contextmanager
    def _given_back_on_error(self, buffers: list[memoryview]) -> Iterator[None]:
        """Returns buffers and their places in the queue if filling them raises."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._free += buffers
            for _ in buffers:
                self._queue.release()
            raise

    def _run(self) -> None:
        while (save := self._queue.take_save()) is not None:
            if isinstance(save, QueuedUse):
                self._use(save.keys)
                continue
            is_saved = False
            try:
                is_saved = self._store.save(save.key, save.buffer)
            except Exception as error:
                logger.warning("a block could not be stored: %s: %s", type(error).__name__, error)
            with self._lock:
                self._counts.saved += is_saved and save.is_block
                self._counts.records += is_saved and not save.is_block
                self._counts.refused += not is_saved and save.is_block
                if not is_saved:
                    self._unsaved.append(save.key)
                self._free.append(save.buffer)
            self._queue.release()

    def _use(self, keys: Sequence[bytes]) -> None:
        try:
            self._store.use(keys)
        except Exception as error:
            logger.warning("blocks could not be marked as used: %s: %s", type(error).__name__, error)
        self._queue.release()
