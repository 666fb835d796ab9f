"""An error at every call of a store's medium: nothing is reserved afterwards, and all works once the medium does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.open_files import open_files
from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from tests.store.fault_injector import FaultInjector, read_only
from vllm_gaudi_ucm.store.base import HEADER_BYTES, seal
from vllm_gaudi_ucm.store.file import FileMedium
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.medium import StoredBlock
from vllm_gaudi_ucm.store.memory import MemoryStore
from vllm_gaudi_ucm.store.slot_pool import SlotPool

BLOCKS = 3
CAPACITY = BLOCKS * BLOCK_BYTES
NEW = 100


def record(number: int) -> memoryview:
    whole = memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES))
    whole[HEADER_BYTES:] = block(number)
    seal(whole, key(number))
    return whole


def empty_record() -> memoryview:
    return memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES))


def full_medium(path: Path) -> FileMedium:
    """With `fsync`, of which none takes any time."""
    medium = FileMedium(Folder(path), CAPACITY, fsync=True)
    for number in range(BLOCKS):
        medium.write(key(number), record(number))
    return medium


OPERATIONS: dict[str, Callable[[FileMedium], Any]] = {
    "write": lambda medium: medium.write(key(NEW), record(NEW)),
    "read": lambda medium: medium.read(key(1), BLOCK_BYTES, empty_record()),
    "keep": lambda medium: medium.keep(key(1), BLOCK_BYTES),
    "lookup": lambda medium: medium.lookup([key(n) for n in range(5)], BLOCK_BYTES),
    "delete": lambda medium: medium.delete([StoredBlock(key(n), BLOCK_BYTES) for n in (0, 7)]),
    "blocks": lambda medium: list(medium.blocks()),
    "upkeep": lambda medium: medium.upkeep(),
}


def on_disk(path: Path) -> int:
    return len(list(path.rglob("*.kv")))


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_at_every_call_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, code: int
) -> None:
    """covers: F7. Free, used and reserved make up the capacity after each error, and afterwards everything works."""
    faults = FaultInjector(monkeypatch, code)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for at in itertools.count():
        path = tmp_path / str(at)
        medium = full_medium(path)
        (path / "tmp" / "of-a-dead-writer").write_bytes(b"half")
        os.utime(path / "tmp" / "of-a-dead-writer", (1, 1))
        try:
            with faults.failing(at):
                OPERATIONS[operation](medium)
        except OSError:
            pass
        if at >= len(faults.seen):
            break  # there is no such call
        what = f"call {at}, {faults.seen[at]}"
        check_after_recovery(medium, path, what)
    assert at > 0
    del medium
    assert not open_files(tmp_path)


def check_after_recovery(medium: FileMedium, path: Path, what: str) -> None:
    """The books agree with the disk, and the store takes, evicts and gives what it did before."""
    medium.check_integrity()
    assert medium.reserved == 0, what
    medium.upkeep()
    assert medium.usage(BLOCK_BYTES) == (on_disk(path), on_disk(path) * BLOCK_BYTES, CAPACITY), what
    for number in range(200, 200 + 2 * BLOCKS):
        assert medium.write(key(number), record(number)), what
        medium.check_integrity()
    kept = range(200 + BLOCKS, 200 + 2 * BLOCKS)
    assert medium.lookup([key(number) for number in kept], BLOCK_BYTES) == [True] * BLOCKS, what
    assert (on_disk(path), medium.usage(BLOCK_BYTES).blocks, medium.reserved) == (BLOCKS, BLOCKS, 0), what
    for left in (path / "tmp").iterdir():
        os.utime(left, (1, 1))  # past the grace of a writer that has not locked its file yet
    medium.upkeep()
    assert list((path / "tmp").iterdir()) == [], what


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_full_store_that_fails_for_a_while_works_again(
    tmp_path: Path, open_one: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """covers: F7. More failed saves than there are blocks: none of them takes room for good, or costs a block."""
    capacity = 8 * BLOCK_BYTES
    options = {"kind": "file", "path": str(tmp_path / "s"), "capacity": capacity, "deadline": 20.0, "fsync": False}
    store = open_one(options | {"breaker": {"failures": 100, "seconds": 0.01}})
    for number in range(8):
        assert store.save(key(number), block(number))
    with read_only(monkeypatch, code):
        for number in range(8, 17):
            assert not store.save(key(number), block(number))
    assert holds(store, range(8)) == list(range(8))
    for number in range(20, 23):
        assert store.save(key(number), block(number))
    assert holds(store, range(30)) == [3, 4, 5, 6, 7, 20, 21, 22]
    store.check_integrity()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_store_that_becomes_read_only_still_loads(
    tmp_path: Path, open_one: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A touch that fails is counted and said once; saves that fail do not open the breaker for the loads."""
    store = open_one({"kind": "file", "path": str(tmp_path / "s"), "deadline": 20.0, "fsync": False})
    for number in range(4):
        store.save(key(number), block(number))
    with read_only(monkeypatch, code), caplog.at_level(logging.WARNING, logger="vllm.gaudi_ucm.store"):
        for _ in range(3):
            assert [loaded(store, number) == block(number) for number in range(4)] == [True] * 4
        for number in range(10, 16):
            assert not store.save(key(number), block(number))
        assert store.save(key(1), block(1))  # it is there
        assert loaded(store, 2) == block(2)
    stats = store.stats()
    assert (stats.breaker, stats.hits, stats.misses, stats.untouched) == ("closed", 13, 0, 14)
    assert stats.errors == 6
    said = [entry.getMessage() for entry in caplog.records]
    assert len([text for text in said if "could not be marked as used" in text]) == 1
    assert len([text for text in said if "takes no more blocks" in text]) == 1
    assert len(said) == 2
    assert store.save(key(20), block(20))


def test_a_corrupt_block_that_cannot_be_removed_costs_no_other(
    tmp_path: Path, open_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: D3. One call asks for several blocks of a store that became read-only."""
    store = open_one({"kind": "file", "path": str(tmp_path / "s"), "deadline": 20.0, "fsync": False})
    for number in range(3):
        store.save(key(number), block(number))
    Path(Folder(tmp_path / "s").file(StoredBlock(key(1), BLOCK_BYTES))).write_bytes(b"short")
    with read_only(monkeypatch, errno.EROFS):
        loans = store.lend([key(0), key(1), key(2)])
    assert [loan is not None for loan in loans] == [True, False, True]
    for loan in loans:
        if loan is not None:
            loan.__exit__(None, None, None)
    stats = store.stats()
    assert (stats.corrupt, stats.errors, stats.breaker) == (1, 1, "closed")


@pytest.mark.parametrize("step", ["copyto", "view", "take_slot", "frombuffer"])
def test_an_error_in_every_step_of_a_save_to_memory(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """covers: F7"""
    store = MemoryStore(BLOCK_BYTES, CAPACITY)
    for number in range(BLOCKS):
        store.save(key(number), block(number))

    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    for number in range(10, 10 + 2 * BLOCKS):
        with monkeypatch.context() as patch:
            patch.setattr(SlotPool if step in ("view", "take_slot") else np, step, failing)
            with contextlib.suppress(MemoryError):
                assert not store.save(key(number), block(number))
        store.check_integrity()
    for number in range(20, 20 + 2 * BLOCKS):
        assert store.save(key(number), block(number))
    assert holds(store, range(30)) == list(range(20 + BLOCKS, 20 + 2 * BLOCKS))
    store.check_integrity()


def test_an_error_while_memory_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7. What was to be lent in the same call is read by nobody: it can be evicted."""
    from vllm_gaudi_ucm.store import memory as module

    store = MemoryStore(BLOCK_BYTES, CAPACITY)
    for number in range(BLOCKS):
        store.save(key(number), block(number))
    loan, made = module.MemoryLoan, []

    def failing(*arguments: Any) -> Any:
        made.append(loan(*arguments))
        if len(made) == BLOCKS:
            raise MemoryError("no memory")
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module, "MemoryLoan", failing)
        with pytest.raises(MemoryError):
            store.lend([key(number) for number in range(BLOCKS)])
    for number in range(20, 20 + BLOCKS):
        assert store.save(key(number), block(number))
    assert holds(store, range(30)) == list(range(20, 20 + BLOCKS))
    store.check_integrity()


def test_a_directory_is_synced_after_a_block_is_moved_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: D3. Without it a power cut can lose the name of a block that is on the disk."""
    medium = FileMedium(Folder(tmp_path / "s"), CAPACITY, fsync=True)
    done: list[tuple[str, str]] = []
    fsync, rename, mkdir = os.fsync, os.rename, os.mkdir

    def place(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def syncing(descriptor: int) -> None:
        done.append(("sync", place(descriptor)))
        fsync(descriptor)

    def moving(source: str, target: str, **at: int) -> None:
        rename(source, target, **at)
        done.append(("move", f"{place(at['dst_dir_fd'])}/{target}" if at else target))

    def making(name: str, *rest: Any, **at: Any) -> None:
        mkdir(name, *rest, **at)
        done.append(("make", f"{place(at['dir_fd'])}/{name}" if at else name))

    for name, call in (("fsync", syncing), ("rename", moving), ("mkdir", making)):
        monkeypatch.setattr(os, name, call)
    medium.write(key(1), record(1))
    file = Path(medium._folder.file(StoredBlock(key(1), BLOCK_BYTES)))
    outer = file.parent.parent
    parents = [
        what for what in done if what[0] == "make" or what[1] in (str(outer), str(outer.parent), str(outer.parents[1]))
    ]
    assert parents == [
        step
        for made in (outer.parent, outer, file.parent)
        for step in (("make", str(made)), ("sync", str(made.parent)))
    ]
    rest = [what for what in done if what not in parents]
    assert rest[0][0] == "sync"
    assert rest[0][1].startswith(str(tmp_path / "s" / "tmp"))
    assert rest[1:] == [("move", str(file)), ("sync", str(file.parent))]
    done.clear()
    FileMedium(Folder(tmp_path / "s"), CAPACITY, fsync=False).write(key(2), record(2))
    assert [what for what in done if what[0] == "sync"] == []


def test_io_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7, D7. The system gives no thread: the call fails at once, nothing of it runs later, and threads come
    as soon as there are some."""
    import threading

    from vllm_gaudi_ucm.store.io_threads import IoThreads

    threads, ran = IoThreads("test-io", 2), []

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                threads.call(lambda _: ran.append("too late"), 5)
    assert threads.call(lambda _: 7, 5) == 7
    time.sleep(0.05)
    assert ran == []
    assert threads.close(5)
