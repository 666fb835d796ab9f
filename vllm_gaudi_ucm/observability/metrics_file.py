"""Metrics of one process as memory-mapped files, which another process reads while they are written."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from prometheus_client.mmap_dict import mmap_key

from vllm_gaudi_ucm.observability.metric import Metric

# Room for 4096 buckets, the most that a configuration can ask for; the files do not grow.
COUNTER_BYTES = 1 << 20
GAUGE_BYTES = 1 << 16
CELL = struct.calcsize("d")


class Series:
    """One metric with its label values: a cell of 8 bytes, so that a store is never seen half, and its time stamp."""

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
        """A new entry of value 0. One that has no room left is counted, and not read by anybody."""
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
    """The files of one engine in `folder`; without a folder the same in memory of its own, which nobody reads.

    engine: the value of the label `engine`. writer: what the files are named after, without `_`.
    Raises OSError where the folder does not take them.
    """

    def __init__(self, folder: Path | None, engine: int, writer: str) -> None:
        self._engine = str(engine)
        # The reader takes kind, mode and writer from the name; `mostrecent`: the last value stands.
        self._entries = {
            "counter": _Entries(_map(folder and folder / f"counter_{writer}.db", COUNTER_BYTES)),
            "gauge": _Entries(_map(folder and folder / f"gauge_mostrecent_{writer}.db", GAUGE_BYTES)),
        }

    def series(self, metric: Metric, *labels: str) -> Series:
        """A new series, from 0, of `metric` with these values of its labels."""
        names, values = ["engine", *metric.labels], [self._engine, *labels]
        return self._entries[metric.kind].append(mmap_key(metric.name, metric.sample_name, names, values, metric.help))


def _map(path: Path | None, size: int) -> mmap.mmap:
    """A new file, allocated in full: a store to a mapped page for which the disk has no room would kill the process.

    It takes its place, and that of an earlier engine's file, once it is whole: a reader never finds it empty or gone.
    """
    if path is None:
        return mmap.mmap(-1, size)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with new.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        new.replace(path)
        return mmap.mmap(file.fileno(), size)
