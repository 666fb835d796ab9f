"""A medium in memory that does what a test tells it to: fail, hang, fill up, give back something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from vllm_gaudi_ucm.store.medium import FullError, Medium, StoredBlock, Usage


class FaultyMedium(Medium):
    """error: raised by every call. gate: calls wait until it is set. full: writes raise FullError."""

    kind = "faulty"
    upkeep_seconds = 1e9

    def __init__(self) -> None:
        self.records: dict[StoredBlock, bytes] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        self.calls = 0
        self.closed = False

    def place(self) -> str:
        return "faulty medium"

    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        self._called()
        return [StoredBlock(key, block_bytes) in self.records for key in keys]

    def keep(self, key: bytes, block_bytes: int) -> bool:
        return self.lookup([key], block_bytes)[0]

    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        self._called()
        found = self.records.get(StoredBlock(key, block_bytes))
        if found is not None:
            record[: len(found)] = found[: len(record)]
        return None if found is None else len(found)

    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        return self.read(key, block_bytes, record)

    def write(self, key: bytes, record: memoryview) -> bool:
        self._called()
        if self.full:
            raise FullError("no room")
        self.records[StoredBlock(key, len(record) - 64)] = bytes(record)
        return True

    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        self._called()
        return sum(self.records.pop(block, None) is not None for block in blocks)

    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        self._called()
        return iter([block for block in self.records if block_bytes in (None, block.block_bytes)])

    def usage(self, block_bytes: int) -> Usage:
        return Usage(len(self.records), sum(block.block_bytes for block in self.records), None)

    def upkeep(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _called(self) -> None:
        self.calls += 1
        self.gate.wait()
        if self.error is not None:
            raise self.error
