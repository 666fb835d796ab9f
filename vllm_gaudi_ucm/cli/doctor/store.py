"""Doctor's section on a store: the round trip of a block, and the limits of the store."""

import os
import time
from collections.abc import Iterator

from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.options.errors import UcmConfigError, counted
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.base import KvStore, StoreOptions
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_text, store_class

SECTION = "store"
BLOCK_BYTES = 1 << 20


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


def checks_of_store(options: StoreOptions) -> Iterator[Check]:
    try:
        store = open_store(options, BLOCK_BYTES)
    except ValueError as error:
        yield Check(SECTION, options.kind, "fail", str(error), "a store that opens", "correct it")
        return
    try:
        yield _round_trip(options.kind, store)
    finally:
        store.close()
    for finding in store_class(options.kind).findings(options):
        status: Status = "ok" if finding.is_good else "warn"
        yield Check(SECTION, finding.name, status, finding.found, finding.expected, finding.advice)


def _round_trip(kind: str, store: KvStore) -> Check:
    """Saves, looks up, loads and deletes one block under a unique key."""
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
            expected = "save, lookup, load and delete within store.deadline"
            return Check(SECTION, name, "fail", found, expected, store_class(kind).advice)
        milliseconds.append(f"{step} {(time.perf_counter() - begin) * 1e3:.1f} ms")
    return Check(SECTION, name, "ok", ", ".join(milliseconds))
