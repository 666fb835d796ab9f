"""Hours of traffic in seconds: whatever callers and stores do, nothing is lost, leaked or attended by accident."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from tests.prefetch.lent_blocks import LendingStore
from tests.prefetch.stores import BLOCK_BYTES, content, key
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine, PrefetchHandle
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority

KEYS = 60
IDS = 24
CACHE = 12
STEPS = 20_000


class FaultyStore(LendingStore):
    """Slow, missing, raising, and now and then ending the thread that asks it; blocks above 50 are never there.

    Half of its blocks it lends, up to three in a call.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(range(50), batch=3)
        self.waits = seed % 2 == 0
        self._random = random.Random(seed)

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        """Now and then."""
        return super().lend(keys) if self._random.random() < 0.5 else None

    def load(self, key: bytes, into: memoryview) -> bool:
        chance = self._random.random()
        if chance < 0.1:
            time.sleep(chance / 50)
        elif chance < 0.15:
            into[:8] = b"\xff" * 8
            raise OSError("faulty")
        elif chance < 0.16:
            raise SystemExit
        found = super().load(key, into)
        self.order.clear()
        return found


class DeviceBlocks:
    """Blocks of a device and who owns them: a write to a block that is not its owner's is what must never happen."""

    def __init__(self) -> None:
        self.owner: dict[int, str] = {}
        self.data: dict[tuple[int, str], bytes] = {}
        self.wrong: list[str] = []
        self._free = list(range(400))
        self._lock = threading.Lock()

    def take(self, owner: str, count: int) -> list[int]:
        with self._lock:
            blocks = [self._free.pop() for _ in range(count)]
            self.owner |= dict.fromkeys(blocks, owner)
            return blocks

    def write(self, block: int, owner: str, data: memoryview) -> None:
        if self.owner.get(block) != owner:
            self.wrong.append(f"{owner} wrote to block {block} of {self.owner.get(block)}")
        self.data[block, owner] = bytes(data)

    def give_back(self, blocks: list[int]) -> None:
        with self._lock:
            for block in blocks:
                self.data.pop((block, self.owner.pop(block)), None)
            self._free += blocks


class Traffic:
    """Random requests: prefetched, loaded into device blocks, moved, aborted, finished, with ids that come again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        options = PrefetchOptions(
            prefetch_workers=4, max_pending_prefetch=8, prefetch_cache_size=CACHE, deadline=0.2, ageing=0.01
        )
        self.engine = PrefetchEngine(FaultyStore(seed), BLOCK_BYTES, options)
        self.engine.start()
        self.device = DeviceBlocks()
        self.loading: dict[str, tuple[PrefetchHandle, list[bytes], list[int], str]] = {}
        self.lives = 0
        self.ready = 0

    def step(self) -> None:
        name = f"id {self.random.randrange(IDS)}"
        action = self.random.choices(
            [self.prefetch, self.load, self.move, self.abort, self.poll, self.read, self.restart],
            [6, 6, 2, 2, 6, 2, 0.02],
        )[0]
        action(name)
        assert not self.device.wrong
        self.engine.check_integrity()

    def keys(self) -> list[bytes]:
        return [key(self.random.randrange(KEYS)) for _ in range(self.random.randrange(8))]

    def prefetch(self, name: str) -> None:
        if name not in self.loading:
            self.engine.submit_prefetch(name, self.keys(), self.random.choice(list(PrefetchPriority)))

    def load(self, name: str) -> None:
        if name in self.loading:
            return
        self.lives += 1
        wanted, owner = self.keys(), f"life {self.lives}"
        blocks, write = self.device.take(owner, len(wanted)), self.device.write

        def deliver(index: int, block: memoryview) -> None:
            write(blocks[index], owner, block)

        handle = self.engine.submit_prefetch(name, wanted, PrefetchPriority.URGENT, deliver)
        self.loading[name] = handle, wanted, blocks, owner

    def move(self, name: str) -> None:
        self.engine.reprioritise(name, self.random.choice(list(PrefetchPriority)))

    def abort(self, name: str) -> None:
        assert self.engine.drain(name, 10)
        if name in self.loading:
            self.device.give_back(self.loading.pop(name)[2])
        self.engine.forget(name)

    def poll(self, name: str) -> None:
        """A load that is complete: what did not fail is on the device, and true."""
        if name not in self.loading or self.loading[name][0].outcome is None:
            return
        handle, wanted, blocks, owner = self.loading.pop(name)
        for index in set(range(len(wanted))) - handle.failed:
            assert self.device.data[blocks[index], owner] == content(wanted[index])
        assert (handle.outcome is PrefetchOutcome.READY) == (not handle.failed)
        self.ready += handle.outcome is PrefetchOutcome.READY
        self.device.give_back(blocks)
        self.engine.forget(name)

    def read(self, name: str) -> None:
        if name in self.loading:
            return
        for block in self.engine.get_prefetched_kv(name) or ():
            assert bytes(block) == content(bytes(block[:32]))
        self.engine.forget(name)

    def restart(self, name: str) -> None:
        assert self.engine.stop(10)
        for started in list(self.loading):
            assert self.loading[started][0].outcome is not None
            self.poll(started)
        self.engine.start()

    def end(self) -> None:
        for name in list(self.loading):
            self.abort(name)
        for number in range(IDS):
            self.engine.forget(f"id {number}")
        assert self.engine.stop(10)
        self.engine.check_integrity()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_churn_leaks_nothing(seed: int) -> None:
    """covers: C5, C6, C8, C9"""
    threads = threading.active_count()
    traffic, end = Traffic(seed), time.monotonic() + 60
    for _ in range(STEPS):
        traffic.step()
        if time.monotonic() > end:
            break
    traffic.end()
    stats = traffic.engine.stats()
    assert threading.active_count() == threads
    assert (stats.pending, stats.threads, stats.cache_bytes, stats.queue_depth[PrefetchPriority.LOW]) == (0, 0, 0, 0)
    assert sum(stats.outcomes.values()) == stats.submitted
    assert traffic.ready > 50, "the churn was all faults"
    assert min(stats.misses, stats.errors, stats.threads_replaced, stats.blocks_cached, stats.blocks_shared) > 0
    assert not traffic.device.wrong
    assert len(traffic.device._free) == 400
