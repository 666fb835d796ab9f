"""Faults of one of several workers: functions that a test has run in the workers' processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.connector.worker_side import WorkerSide


def side_of(worker: Any) -> WorkerSide:
    """Our connector's, in a worker."""
    ours = our_connector(worker.model_runner.transfer.connector)
    assert ours is not None
    assert ours.worker_side is not None
    return ours.worker_side


class FaultyLoads:
    """Takes the place of the loads of a connector's store.

    gate: loads wait for it. lost: keys of blocks that are not found. deadline: seconds of a load, as configured.
    """

    def __init__(self, side: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.lost: set[bytes] = set()
        self.deadline = side.loads._deadline
        self._lend, self._load = side.store.lend, side.store.load
        side.store.lend, side.store.load = self.lend, self.load

    def lend(self, keys: Sequence[bytes]) -> list[Any] | None:
        self.gate.wait(60)
        loans = self._lend([key for key in keys if key not in self.lost])
        if loans is None:
            return None
        found = iter(loans)
        return [None if key in self.lost else next(found) for key in keys]

    def load(self, key: bytes, into: memoryview) -> bool:
        self.gate.wait(60)
        return key not in self.lost and self._load(key, into)


def _faulty(worker: Any) -> FaultyLoads:
    side: Any = side_of(worker)
    if not hasattr(side, "faulty_loads"):
        side.faulty_loads = FaultyLoads(side)
    found: FaultyLoads = side.faulty_loads
    return found


def hold_loads(worker: Any, rank: int, deadline: float | None = None) -> None:
    """The loads of one rank do not end, or only with their deadline, in seconds."""
    if worker.rank == rank:
        _faulty(worker).gate.clear()
        if deadline is not None:
            side_of(worker).loads._deadline = deadline


def lose_blocks(worker: Any, rank: int, keys: Collection[bytes]) -> None:
    """One rank does not get these from its store from now on, although a look-up finds them."""
    if worker.rank == rank:
        _faulty(worker).lost = set(keys)


def heal_loads(worker: Any) -> None:
    """Every load goes on."""
    faulty = _faulty(worker)
    faulty.gate.set()
    faulty.lost = set()
    side_of(worker).loads._deadline = faulty.deadline


def loading(worker: Any) -> int:
    """Requests that wait for their load on this worker."""
    return len(side_of(worker).loads)


def lost_loads(worker: Any) -> tuple[int, int]:
    """On this worker: blocks that were not loaded, and requests whose load was too late."""
    counts = side_of(worker).loads.counts
    return counts.failed_blocks, counts.timeouts


def _offload(worker: Any) -> Any:
    return worker.model_runner.parts.sparse.offload


def settle_saves(worker: Any) -> None:
    """Everything is stored."""
    assert side_of(worker).saver.flush(60.0)


def settle_moves(worker: Any) -> None:
    """Memory mode from now on waits for the copies that are under way: what is where depends on no clock."""
    offload = _offload(worker)
    take_finished, copies = offload._take_finished, offload._copies
    loads = [copies._loads] if offload._stored is None else [copies._loads, offload._stored.loads]

    def settled() -> bool:
        handles = [handle for one in loads for handle, _ in one._loads.values()]
        return all(save.done() for save in copies._saves.values()) and all(handle.outcome for handle in handles)

    def take_settled() -> None:
        end = time.monotonic() + 60
        while not settled():
            assert time.monotonic() < end, "copies are still under way"
            time.sleep(0.0005)
        take_finished()

    offload._take_finished = take_settled


def spoil_copies(worker: Any, rank: int) -> None:
    """One rank cannot make some copies, for want of host memory or of its store, cannot read others, and all of its
    moves end a step late."""
    if worker.rank != rank:
        return
    offload = _offload(worker)
    copies, allocate = offload._copies, offload._blocks.allocate
    store, made = copies.store, 0

    def number(key: bytes) -> int:
        return int.from_bytes(key[-8:], "big")

    def scarce(nbytes: int) -> memoryview:
        nonlocal made
        made += 1
        if made % 5 == 0:
            raise MemoryError(f"{nbytes} bytes")
        buffer: memoryview = allocate(nbytes)
        return buffer

    save, load = store.save, store.load
    store.save = lambda key, block: number(key) % 4 != 1 and save(key, block)
    store.lend = lambda keys: None
    store.load = lambda key, into: number(key) % 4 != 2 and load(key, into)
    offload._blocks.allocate = scarce
    for name in ("finished_saves", "finished_loads"):
        setattr(copies, name, _late(getattr(copies, name), offload))


def _late(finished: Callable[[], Iterable[Any]], offload: Any) -> Callable[[], Iterable[Any]]:
    held: list[Any] = []

    def one_call_later() -> list[Any]:
        nonlocal held
        now, held = held, list(finished())
        # of requests that have ended meanwhile there are none
        return [entry for entry in now if entry[0] in offload._moves._moves]

    return one_call_later
