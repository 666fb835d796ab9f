"""Doctor's section on a store: a block makes the round trip, and what will bound the store later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.cli.store.store import resolve_store_text
from vllm_gaudi_ucm.options.errors import UcmConfigError, counted
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.base import KvStore, StoreOptions
from vllm_gaudi_ucm.store.factory import open_store, store_class

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
    for finding in store_class(options.kind).findings(options):
        status: Status = "ok" if finding.is_good else "warn"
        yield Check(SECTION, finding.name, status, finding.found, finding.expected, finding.advice)


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
            expected = "save, lookup, load and delete within store.deadline"
            return Check(SECTION, name, "fail", found, expected, store_class(kind).advice)
        milliseconds.append(f"{step} {(time.perf_counter() - begin) * 1e3:.1f} ms")
    return Check(SECTION, name, "ok", ", ".join(milliseconds))


# Plugins and vLLM print as they like: the answer is the one line that starts with this.
_MARK = "gaudi-ucm-probe: "
GROUP = "vllm.platform_plugins"


class Probe:
    """A question under way in a child process."""

    def __init__(self, *question: str) -> None:
        command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.doctor.store", *question]
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def answer(self, timeout: float = 60.0) -> dict[str, Any]:
        """`{"value": ...}`, or `{"error": text}` where the child raised, died, or took over `timeout` seconds."""
        try:
            stdout, stderr = self._child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            return {"error": f"no answer within {timeout:.0f} s"}
        for line in stdout.splitlines():
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "nothing on stderr")
        return {"error": f"the process ended with code {self._child.returncode}: {last}"}


def platform_of_vllm() -> str:
    """The dotted name of the platform class that vLLM resolves here and now."""
    from vllm.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"


def outcome_of_plugin(name: str, value: str) -> str | None:
    """What a platform plugin returns when called bare: a platform class's dotted name, or None."""
    outcome = EntryPoint(name, value, GROUP).load()()
    return None if outcome is None else str(outcome)


def main(question: Sequence[str]) -> int:
    """The child's side: prints the marked answer, also where the question raised."""
    try:
        value = platform_of_vllm() if question[0] == "platform" else outcome_of_plugin(*question[1:])
        answer: dict[str, Any] = {"value": value}
    except Exception as error:
        # Not swallowed: it is the answer, and the doctor shows it.
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
