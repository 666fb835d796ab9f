"""Bandwidth of loads: each store, what it is built on, and the prefetch engine over it; interleaved medians."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store_servers import redis_server
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.store.base import KvStore
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

Run = Callable[[list[memoryview]], None]
COPY = "plain copy"
PEERS = {"file": "pread", "redis": "redis get", "memory": COPY}
# Bytes that the client reads from the socket at once: its own default is half as fast with blocks of a MiB.
SOCKET_READ = 1 << 18


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def copy_block(target: memoryview, source: memoryview) -> None:
    """Copies like a copy to a device: other threads run in the meantime."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def measure_bandwidth(
    block_bytes: int, count: int, repeats: int, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Rows: MiB per second, and the ratio to a plain copy and to what the store is built on.

    CPU seconds are those of this process, all threads together: they show the work even on a busy machine. Every
    contender reads memory or files of its own, untouched since its last turn, in a new order in each round: no
    contender finds more in the processor's caches than the others.
    """
    data = np.random.default_rng(0).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    targets = [memoryview(row) for row in np.zeros_like(data)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = _contenders(stack, folder, data)
        times: dict[str, list[float]] = {name: [] for name in runs}
        busy: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats + 1):
            for index, (name, run) in enumerate(random.sample(list(runs.items()), len(runs))):
                for target in targets:
                    target[:8] = b"\xee" * 8
                start, start_busy = time.perf_counter(), time.process_time()
                run(targets)
                spent, spent_busy = time.perf_counter() - start, time.process_time() - start_busy
                assert all(target == memoryview(row) for target, row in zip(targets, data, strict=True)), name
                if repeat:  # the first round faults memory in
                    times[name].append(spent)
                    busy[name].append(spent_busy)
                progress((repeat + index / len(runs)) / (repeats + 1))
    mib = data.nbytes / 2**20
    speeds = {name: mib / statistics.median(spent) for name, spent in times.items()}
    return [_row(name, speeds) | {"MiB per CPU second": mib / statistics.median(busy[name])} for name in speeds]


def _row(name: str, speeds: dict[str, float]) -> dict[str, Any]:
    peer = speeds.get(PEERS.get(name.split()[0], ""))
    own = None if peer is None or name in PEERS.values() else speeds[name] / peer
    return {
        "contender": name,
        "MiB/s": speeds[name],
        "of a plain copy": speeds[name] / speeds[COPY],
        "of its peer": own,
    }


def _contenders(stack: ExitStack, folder: Path, data: np.ndarray[Any, Any]) -> dict[str, Run]:
    blocks = [memoryview(row) for row in data]
    # results are compared with `data`, which is in the caches because of that
    sources = [memoryview(row) for row in data.copy()]

    def copy(targets: list[memoryview]) -> None:
        for target, source in zip(targets, sources, strict=True):
            copy_block(target, source)

    runs: dict[str, Run] = {COPY: copy}
    options: list[dict[str, Any]] = [
        {"kind": "memory", "capacity": 2 * data.nbytes},
        {"kind": "file", "path": str(folder / "store"), "capacity": 2 * data.nbytes, "deadline": 10.0, "fsync": False},
    ]
    runs["pread"] = _pread(folder, blocks)
    socket = stack.enter_context(redis_server(folder))
    if socket is not None:
        options.append({"kind": "redis", "url": f"unix://{socket}?db=0", "deadline": 10.0})
        runs["redis get"] = _redis_get(socket, blocks)
    for given in options:
        store = open_store(resolve_store_options(given), data.shape[1])
        stack.callback(store.close)
        assert all(store.save(key(number), block) for number, block in enumerate(blocks))
        runs[f"{given['kind']} load"] = _load(store)
        for workers in (1, 4):
            runs[f"{given['kind']} engine, {workers} threads"] = _engine(stack, store, data.shape[1], workers)
    return runs


def _pread(folder: Path, blocks: list[memoryview]) -> Run:
    paths = [folder / f"plain-{number}" for number in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_bytes(block)

    def run(targets: list[memoryview]) -> None:
        for path, target in zip(paths, targets, strict=True):
            file = os.open(path, os.O_RDONLY)
            assert os.preadv(file, [target], 0) == len(target)
            os.close(file)

    return run


def _redis_get(socket: Path, blocks: list[memoryview]) -> Run:
    import redis

    client = redis.Redis(unix_socket_path=str(socket), db=1, socket_read_size=SOCKET_READ)
    for number, block in enumerate(blocks):
        client.set(key(number), bytes(block))

    def run(targets: list[memoryview]) -> None:
        for number, target in enumerate(targets):
            value: Any = client.get(key(number))
            target[:] = value

    return run


def _load(store: KvStore) -> Run:
    def run(targets: list[memoryview]) -> None:
        for number, target in enumerate(targets):
            assert store.load(key(number), target)

    return run


def _engine(stack: ExitStack, store: KvStore, block_bytes: int, workers: int) -> Run:
    """Each round loads everything: the cache holds a few blocks only, as when traffic has gone through it."""
    engine = PrefetchEngine(store, block_bytes, PrefetchOptions(prefetch_workers=workers, prefetch_cache_size=8))
    engine.start()
    stack.callback(engine.stop)

    def run(targets: list[memoryview]) -> None:
        def deliver(index: int, block: memoryview) -> None:
            copy_block(targets[index], block)

        keys = [key(number) for number in range(len(targets))]
        handle = engine.submit_prefetch("round", keys, PrefetchPriority.URGENT, deliver, deadline=60.0)
        assert handle.wait() is PrefetchOutcome.READY

    return run
