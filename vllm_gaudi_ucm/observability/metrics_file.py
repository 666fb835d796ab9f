"""Metrics of an engine as memory-mapped files, and the private folder in which the API server reads them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import tempfile
import time
from pathlib import Path

from prometheus_client.mmap_dict import mmap_key

from vllm_gaudi_ucm.observability.metric import Metric
from vllm_gaudi_ucm.private_folder import PRIVATE, is_private

PREFIX = "gaudi-ucm-metrics-"
# Held by every engine that writes to the folder, until its process ends, however it does.
LOCK = "lock"


def metrics_folder(instance_id: str) -> Path:
    """The folder of an engine, from vLLM's `instance_id`: the same in all its processes, another for each server.

    vLLM appends `_dp<rank>` to the id of a data-parallel engine in that engine's own process; such engines share one
    folder, in which each has files of its own.
    """
    name = re.sub(r"\W", "_", re.sub(r"_dp\d+$", "", instance_id))
    return Path(tempfile.gettempdir()) / f"{PREFIX}{name}"


def make_private(folder: Path) -> None:
    """Makes the folder, for this user only.

    Raises PermissionError if it exists already and others could write to it, OSError if it cannot be made.
    """
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(
                f"{folder} is not a folder of this user alone (mode 0700); remove it, or set TMPDIR to another folder"
            ) from None


def hold_private(folder: Path) -> int:
    """Make the folder and lock it; the lock ends when the descriptor returned is closed. Raises as `make_private`."""
    while True:
        make_private(folder)
        # until it is locked, another engine that starts may remove it as stale
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def remove_stale() -> None:
    """Remove the folders of this user's engines that were killed together with their servers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_private(folder):
            # removed meanwhile, locked by a living engine, or not locked yet by one that starts
            with contextlib.suppress(OSError):
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    """Removes a dead engine's folder. Raises BlockingIOError if it is locked, FileNotFoundError without a lock."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_files(folder)
    finally:
        os.close(lock)


def remove_files(folder: Path, engine: str = "*") -> None:
    """Remove the files of one engine (or of all), and the folder with the last of them; safe to call twice."""
    if not is_private(folder):
        return
    for file in folder.glob(f"*_{engine}.db"):
        file.unlink(missing_ok=True)
    if folder.is_dir() and {file.name for file in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


# Room for 4096 buckets, the most that a configuration can ask for; the files do not grow.
COUNTER_BYTES = 1 << 20
GAUGE_BYTES = 1 << 16
CELL = struct.calcsize("d")


class Series:
    """One metric with its label values: a cell of 8 bytes, so that a write is never seen in part, and a time stamp."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: memoryview[float], index: int) -> None:
        self._cells = cells
        self._index = index

    def add(self, amount: float) -> None:
        self._cells[self._index] += amount

    def set(self, value: float) -> None:
        self._cells[self._index] = value
        self._cells[self._index + 1] = time.time()


class _Entries:
    """The format of prometheus_client's `MmapedDict`, whose own writer takes three times as long for a value.

    An int32 of the bytes in use and 4 bytes of padding; then entries: int32 length of the key, key, 1 to 8 blanks up to
    a multiple of 8, value and time stamp as doubles.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._cells = memoryview(memory).cast("d")
        self._use(CELL)

    def append(self, key: str) -> Series:
        """Adds an entry of value 0. If no room is left, it counts in memory of its own, and is not exported."""
        text = key.encode()
        padded = text + b" " * (CELL - (len(text) + 4) % CELL)
        entry = struct.pack(f"i{len(padded)}sdd", len(text), padded, 0.0, 0.0)
        start, stop = self._used, self._used + len(entry)
        if stop > len(self._memory):
            return Series(memoryview(bytearray(2 * CELL)).cast("d"), 0)
        self._memory[start:stop] = entry
        # Last: a reader stops at the bytes in use, so it never sees half an entry.
        self._use(stop)
        return Series(self._cells, stop // CELL - 2)

    def _use(self, used: int) -> None:
        self._used = used
        self._memory[:4] = struct.pack("i", used)


class MetricsFile:
    """The files of one engine in `folder`; without a folder they are memory that is not exported.

    engine: the value of the label `engine`. writer: name for the files, without `_`. Raises OSError if they cannot be
        made.
    """

    def __init__(self, folder: Path | None, engine: int, writer: str) -> None:
        self._engine = str(engine)
        # The reader takes kind, mode and writer from the name; `mostrecent`: the last value counts.
        self._entries = {
            "counter": _Entries(_map(folder and folder / f"counter_{writer}.db", COUNTER_BYTES)),
            "gauge": _Entries(_map(folder and folder / f"gauge_mostrecent_{writer}.db", GAUGE_BYTES)),
        }

    def series(self, metric: Metric, *labels: str) -> Series:
        """A new series, from 0, of `metric` with these values of its labels."""
        names, values = ["engine", *metric.labels], [self._engine, *labels]
        return self._entries[metric.kind].append(mmap_key(metric.name, metric.sample_name, names, values, metric.help))


def _map(path: Path | None, size: int) -> mmap.mmap:
    """A new file, allocated in full: writing to a mapped page for which the disk has no room would kill the process.

    It is renamed to `path` once it is complete: a reader never finds it empty or gone.
    """
    if path is None:
        return mmap.mmap(-1, size)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with new.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        new.replace(path)
        return mmap.mmap(file.fileno(), size)
