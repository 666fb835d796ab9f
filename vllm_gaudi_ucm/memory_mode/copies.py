"""Copies of offloaded blocks: the engine's own folder, saves and loads."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.kv_cache.device_blocks import NO_MEMORY
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.reporter import MetricsReporter
from vllm_gaudi_ucm.observability.room_metrics import PrefetchMetrics, StoreMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine, PrefetchHandle
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.private_folder import make_folders
from vllm_gaudi_ucm.store.entries import create_file, entries, open_file, remove_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.prefetch.loads import Allocate
    from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
    from vllm_gaudi_ucm.store.base import KvStore

_ENGINES = "engines"
_LOCK = ".lock"
_NAME = re.compile("[0-9a-f]{16}")

logger = plugin_logger(__name__)


class CopyFolder:
    """The folder `engines/<number>` under `root`, and next to it a file that this process has locked.

    Copies are only useful to the engine that made them, while it lives. Making one removes the copies
    of engines that were killed: the system has ended their locks.

    Raises OSError if no folder can be made in `root`, an existing folder.
    """

    def __init__(self, root: Path) -> None:
        engines = root / _ENGINES
        make_folders(str(engines))
        _sweep(engines)
        self.path, self._lock = _claim(engines)
        make_folders(str(self.path))

    def remove(self) -> None:
        """Removes all that is in it; a second call does nothing."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def _claim(engines: Path) -> tuple[Path, int | None]:
    """A place that is not taken, and the descriptor of its lock."""
    while True:
        path = engines / secrets.token_hex(8)
        lock = create_file(f"{path}{_LOCK}")
        # an engine that starts now may have taken the file for one that was left, and removed it or be about to
        if _try_lock(lock) and os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _sweep(engines: Path) -> None:
    """Removes the places of engines that do not live any more."""
    names = {entry.name.removesuffix(_LOCK) for entry in entries(str(engines))}
    for name in filter(_NAME.fullmatch, names):
        path = engines / name
        try:
            lock = open_file(f"{path}{_LOCK}")
        except FileNotFoundError:
            # the lock exists before the folder, and is removed after it
            _remove(path)
            continue
        if _try_lock(lock):
            logger.info("memory mode: removes the copies of an engine that has ended, %s", path)
            _remove(path)
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> None:
    """Removes copies. Files that cannot be removed take room on the disk, but are never read."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another engine that starts has done it
    except OSError as error:
        logger.warning("memory mode: %s cannot be removed: %s", path, error.strerror)
    remove_file(f"{path}{_LOCK}")


Pair = tuple[int, int]


class CopyLoads:
    """Loads of copies. Nothing here waits for a load, and nothing writes to the device.

    Args:
        engine: loads; the caller's to stop.
        allocate: (bytes) -> host memory.
    """

    def __init__(self, engine: PrefetchEngine, block_bytes: int, allocate: Allocate) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        self._allocate = allocate
        self._loads: dict[Pair, tuple[PrefetchHandle, memoryview]] = {}
        self._failed: list[Pair] = []

    def __len__(self) -> int:
        """Loads under way, and finished ones that were not asked for yet."""
        return len(self._loads) + len(self._failed)

    def start(self, pair: Pair, key: bytes) -> None:
        """Starts to read the block under `key`; `finished` returns it."""
        try:
            data = self._allocate(self._block_bytes)
        except NO_MEMORY as error:
            logger.warning("memory mode: no host memory for a block that comes back: %s", error)
            self._failed.append(pair)
            return

        def deliver(index: int, block: memoryview) -> None:
            data[:] = block

        handle = self._engine.submit_prefetch(f"copy {name_of(pair)}", [key], PrefetchPriority.URGENT, deliver)
        self._loads[pair] = handle, data

    def finished(self) -> Iterator[tuple[Pair, memoryview | None]]:
        """Loads that have ended since the last call: the block, None if it could not be read."""
        failed, self._failed = self._failed, []
        for pair in failed:
            yield pair, None
        for pair in [pair for pair, (handle, _) in self._loads.items() if handle.outcome is not None]:
            handle, data = self._loads.pop(pair)
            is_ready = handle.outcome is PrefetchOutcome.READY
            self._engine.forget(handle.request_id)
            yield pair, data if is_ready else None

    def end(self, generation: int) -> None:
        """Cancels the loads of a generation."""
        self._failed = [pair for pair in self._failed if pair[0] != generation]
        for pair in [pair for pair in self._loads if pair[0] == generation]:
            handle, _ = self._loads.pop(pair)
            self._engine.forget(handle.request_id)


def name_of(pair: Pair) -> str:
    return f"{pair[0]}:{pair[1]}"


_PREFIX_BYTES = 16
_AHEAD = "ahead "
USE = "memory_mode"
"""The value of the labels `store` and `use` of its metrics."""


class CopyStore:
    """A store by the keys of this engine. It never waits for a save or a load, and does not write to the device.

    Keys begin with a number that no other engine has: copies are useless to other engines, and after a restart.

    Args:
        store: where copies are; closed with this. It must not evict: a copy may be the only one of its block.
        allocate: (bytes) -> host memory.
        folder: that the store lies in, if it does; removed with this.
        metrics: where figures of the store and of the engine go; None: nowhere.
    """

    def __init__(
        self,
        store: KvStore,
        block_bytes: int,
        allocate: Allocate,
        options: PrefetchOptions,
        folder: CopyFolder | None = None,
        metrics: StepMetrics | None = None,
    ) -> None:
        self.store = store
        self._folder = folder
        self._prefix = secrets.token_bytes(_PREFIX_BYTES)
        self._engine = PrefetchEngine(store, block_bytes, options)
        self._engine.start()
        self._loads = CopyLoads(self._engine, block_bytes, allocate)
        # one thread: a deletion comes after its save
        self._writer = ThreadPoolExecutor(1, "ucm-memory-mode")
        self._saves: dict[Pair, Future[bool]] = {}
        self._near: set[Pair] = set()
        self._copies: dict[int, set[int]] = {}
        # of the writer's thread: unwanted copies that the store could not delete yet
        self._unwanted: set[bytes] = set()
        self._reporter = None if metrics is None else self._new_reporter(metrics)

    def _new_reporter(self, metrics: StepMetrics) -> MetricsReporter:
        store, engine = StoreMetrics(metrics.file, USE), PrefetchMetrics(metrics.file, USE)

        def report() -> None:
            store.set(self.store.stats())
            engine.set(self._engine.stats())

        return MetricsReporter(report)

    def save(self, pair: Pair, data: memoryview) -> None:
        """data: a block that is not written any more."""
        self._copies.setdefault(pair[0], set()).add(pair[1])
        self._saves[pair] = self._writer.submit(self.store.save, self._key(pair), data)

    def load(self, pair: Pair) -> None:
        """Starts to read a copy; `finished_loads` returns it."""
        self._loads.start(pair, self._key(pair))

    def bring_near(self, pairs: Sequence[Pair]) -> None:
        """Starts to read these copies into host memory, where a later `load` finds them; copies of earlier calls that
        are not named again may be forgotten. Called after the loads of a step, which join reads in progress.
        """
        wanted = set(pairs)
        for pair in self._near - wanted:
            self._engine.forget(_AHEAD + name_of(pair))
        for pair in pairs:
            if pair not in self._near:
                self._engine.submit_prefetch(_AHEAD + name_of(pair), [self._key(pair)], PrefetchPriority.HIGH)
        self._near = wanted

    def finished_saves(self) -> Iterator[tuple[Pair, bool]]:
        """Saves that have ended since the last call, and whether the copy is there."""
        for pair in [pair for pair, future in self._saves.items() if future.done()]:
            future = self._saves.pop(pair)
            yield pair, not future.cancelled() and future.exception() is None and future.result()

    def finished_loads(self) -> Iterator[tuple[Pair, memoryview | None]]:
        """Loads that have ended since the last call: the block, None if the copy could not be read."""
        return self._loads.finished()

    def drop(self, pair: Pair) -> None:
        self._copies[pair[0]].discard(pair[1])
        self._writer.submit(self._delete, [self._key(pair)])

    def end(self, generation: int) -> None:
        """Cancels the moves of a generation and deletes its copies."""
        for pair in [pair for pair in self._saves if pair[0] == generation]:
            del self._saves[pair]
        self._loads.end(generation)
        self.bring_near([pair for pair in self._near if pair[0] != generation])
        numbers = self._copies.pop(generation, None)
        if numbers:
            self._writer.submit(self._delete, [self._key((generation, number)) for number in numbers])

    def check_idle(self) -> None:
        """Raises AssertionError if a move is in progress or a copy is kept. Waits for deletions."""
        self._writer.submit(int).result()
        if self._saves or len(self._loads) or self._near or self._copies:
            moving = f"saving {[*self._saves]}, loading {len(self._loads)}, near {self._near}"
            raise AssertionError(f"copies: {moving}, kept {self._copies}")

    def close(self) -> None:
        """Deletes all copies, ends the threads and closes the store."""
        for generation in [*self._copies]:
            self.end(generation)
        if self._reporter is not None:
            self._reporter.close()
        self._writer.shutdown()
        self._engine.stop()
        self.store.close()
        if self._folder is not None:
            self._folder.remove()

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Deletes these, and earlier ones that could not be deleted: they would take room for good."""
        self._unwanted.update(keys)
        # none: the store was not there, or none of them was
        if self.store.delete(list(self._unwanted)):
            self._unwanted.clear()

    def _key(self, pair: Pair) -> bytes:
        return self._prefix + pair[0].to_bytes(8, "big") + pair[1].to_bytes(8, "big")
