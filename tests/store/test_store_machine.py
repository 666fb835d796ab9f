"""Random histories of each store against a dict, restarts and damage included. The books agree after each step."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.store.redis_server import RedisServer
from tests.store.refusing_store import RefusingStore
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options
from vllm_gaudi_ucm.store.memory import MemoryStore
from vllm_gaudi_ucm.store.tiered import TieredStore

SIZE = 64
keys = st.integers(0, 5).map(lambda number: bytes([number * 40]) * 32)
SETTINGS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


class Machine(RuleBasedStateMachine):
    """The dict holds what the store must hold; nothing is evicted here."""

    options: ClassVar[dict[str, Any]]

    @initialize()
    def open(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.corrupt = 0
        self.store: Any = open_store(resolve_store_options(self.options), SIZE)
        self.store.clear()

    @rule(key=keys, fill=st.integers(0, 255))
    def save(self, key: bytes, fill: int) -> None:
        assert self.store.save(key, memoryview(bytes([fill]) * SIZE))
        self.blocks.setdefault(key, bytes([fill]) * SIZE)  # content-addressed: the first stays

    @rule(key=keys)
    def load(self, key: bytes) -> None:
        into = bytearray(SIZE)
        assert self.store.load(key, memoryview(into)) == (key in self.blocks)
        if key in self.blocks:
            assert into == self.blocks[key]

    @rule(wanted=st.lists(keys))
    def lookup(self, wanted: list[bytes]) -> None:
        assert self.store.lookup(wanted) == [key in self.blocks for key in wanted]

    @rule(gone=st.lists(keys, unique=True))
    def delete(self, gone: list[bytes]) -> None:
        assert self.store.delete(gone) == sum(self.blocks.pop(key, None) is not None for key in gone)

    @rule()
    def verify(self) -> None:
        assert self.store.verify() == (len(self.blocks), 0)

    @rule()
    def clear(self) -> None:
        assert self.store.clear() == len(self.blocks)
        self.blocks.clear()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            stats = self.store.stats()
            assert (stats.blocks, stats.bytes) == (len(self.blocks), len(self.blocks) * SIZE)
            assert (stats.errors, stats.timeouts, stats.corrupt) == (0, 0, self.corrupt)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class OutsideMachine(Machine):
    """What is outside the process survives a restart."""

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(resolve_store_options(self.options), SIZE)
        self.corrupt = 0


class FileMachine(OutsideMachine):
    """Files may be damaged by anybody."""

    @precondition(lambda self: self.blocks)
    @rule(place=st.integers(0, 63 + SIZE), data=st.data())
    def damage(self, place: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.blocks)))
        (file,) = Path(self.options["path"]).rglob(f"{key.hex()}.kv")
        with file.open("r+b") as record:
            content = record.read()
            record.seek(place)
            record.write(bytes([content[place] ^ 0x80]))
            os.fsync(record.fileno())
        assert not self.store.load(key, memoryview(bytearray(SIZE)))
        del self.blocks[key]
        self.corrupt += 1


class TieredMachine(Machine):
    """The front has room for everything, so that nothing is lost while the store behind it refuses blocks."""

    @initialize()
    def open(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.corrupt = 0
        self.behind = RefusingStore(SIZE, 1 << 20)
        self.store: Any = TieredStore(MemoryStore(SIZE, 1 << 20), self.behind, SIZE)

    @rule(refuses=st.booleans())
    def change(self, refuses: bool) -> None:
        self.behind.refuses = refuses

    @rule(wanted=st.lists(keys))
    def lend(self, wanted: list[bytes]) -> None:
        for one, loan in zip(wanted, self.store.lend(wanted), strict=True):
            assert (loan is not None) == (one in self.blocks)
            if loan is not None:
                with loan as content:
                    assert content == self.blocks[one]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.behind.refuses = False
            self.behind.close = lambda: None  # type: ignore[method-assign]
            self.store.close()
            assert self.behind.lookup(list(self.blocks)) == [True] * len(self.blocks)


def test_tiered_with_a_store_behind_that_refuses() -> None:
    run_state_machine_as_test(TieredMachine, settings=SETTINGS)


def test_memory() -> None:
    """covers: C5"""
    machine = type("MemoryMachine", (Machine,), {"options": {"kind": "memory", "capacity": "1MiB", "pin": False}})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_file() -> None:
    """covers: C5, D3"""
    folder = tempfile.mkdtemp(prefix="store-machine-")
    options = {"kind": "file", "path": folder, "fsync": False, "deadline": 20.0, "io_threads": 1}
    try:
        run_state_machine_as_test(type("TheFileMachine", (FileMachine,), {"options": options}), settings=SETTINGS)
    finally:
        shutil.rmtree(folder)


def test_redis(request: pytest.FixtureRequest) -> None:
    """covers: C5"""
    server: RedisServer = request.getfixturevalue("redis_server")
    options = {"kind": "redis", "url": server.url, "deadline": 20.0}
    run_state_machine_as_test(type("RedisMachine", (OutsideMachine,), {"options": options}), settings=SETTINGS)
