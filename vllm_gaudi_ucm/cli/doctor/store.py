"""Doctor's section on a store: a block makes the round trip, and what will bound the store later."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.store.store import resolve_store_text
from vllm_gaudi_ucm.options.errors import UcmConfigError, counted
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.base import KvStore
from vllm_gaudi_ucm.store.factory import open_medium, open_store
from vllm_gaudi_ucm.store.options import FileStoreOptions, MemoryStoreOptions, RedisStoreOptions
from vllm_gaudi_ucm.store.redis import RedisMedium

SECTION = "store"
BLOCK_BYTES = 1 << 20
_ADVICE = {
    "memory": "lower store.capacity, or see how much memory the process may use",
    "file": "see whether the folder's disk answers, has room and may be written by this user",
    "redis": "see whether the server runs at store.url and answers: redis-cli -u URL ping",
}


def store_checks(text: str | None) -> Iterator[Check]:
    """The section's rows for `--store`: JSON, or the path of a file; none without it."""
    if text is None:
        return
    try:
        options = resolve_store_text(text)
    except UcmConfigError as error:
        for problem in error.problems:
            yield Check(SECTION, problem.key, "fail", problem.found, problem.expected, "correct it")
        return
    yield from checks_of_store(options)


def checks_of_store(options: MemoryStoreOptions | FileStoreOptions | RedisStoreOptions) -> Iterator[Check]:
    """The rows of one store."""
    try:
        store = open_store(options, BLOCK_BYTES)
    except ValueError as error:
        yield Check(SECTION, options.kind, "fail", str(error), "a store that opens", "correct it")
        return
    try:
        yield _round_trip(options.kind, store)
    finally:
        store.close()
    if isinstance(options, FileStoreOptions):
        yield _free_disk(options)
    if isinstance(options, RedisStoreOptions):
        yield from _server_memory(options)


def _round_trip(kind: str, store: KvStore) -> Check:
    """Saves, looks up, loads and deletes one block under a key that nothing else has."""
    key, block, into = os.urandom(32), memoryview(os.urandom(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    name, milliseconds = f"{kind} store, round trip of {show_bytes(BLOCK_BYTES)}", []
    for step, call in (
        ("save", lambda: store.save(key, block)),
        ("lookup", lambda: store.lookup([key]) == [True]),
        ("load", lambda: store.load(key, into) and into == block),
        ("delete", lambda: store.delete([key]) == 1),
    ):
        begin = time.perf_counter()
        if not call():
            stats = store.stats()
            errors, timeouts = counted(stats.errors, "error"), counted(stats.timeouts, "time-out")
            found = f"{step} failed ({errors}, {timeouts}, {stats.corrupt} corrupt)"
            return Check(
                SECTION, name, "fail", found, "save, lookup, load and delete within store.deadline", _ADVICE[kind]
            )
        milliseconds.append(f"{step} {(time.perf_counter() - begin) * 1e3:.1f} ms")
    return Check(SECTION, name, "ok", ", ".join(milliseconds))


def _free_disk(options: FileStoreOptions) -> Check:
    free = shutil.disk_usage(options.path).free
    medium = open_medium(options)
    held = sum(block.block_bytes for block in medium.blocks())
    medium.close()
    found = f"{show_bytes(free)} free, {show_bytes(held)} in the store"
    enough = free + held >= options.capacity
    expected = f"room for store.capacity, {show_bytes(options.capacity)}"
    advice = "" if enough else "lower store.capacity: on a full disk blocks are not saved"
    return Check(SECTION, "disk", "ok" if enough else "warn", found, expected, advice)


def _server_memory(options: RedisStoreOptions) -> Iterator[Check]:
    medium = open_medium(options)
    assert isinstance(medium, RedisMedium)
    try:
        bound, policy = medium.memory_policy()
    except medium.errors:
        return  # the round trip has failed, too, and says so
    finally:
        medium.close()
    found = f"maxmemory {show_bytes(bound) if bound else 'unlimited'}, maxmemory-policy {policy}"
    good = bool(bound) and policy != "noeviction"
    advice = "" if good else "redis-cli config set maxmemory 16gb; redis-cli config set maxmemory-policy allkeys-lru"
    yield Check(
        SECTION, "server's memory", "ok" if good else "warn", found, "a bound, and a policy that evicts", advice
    )
