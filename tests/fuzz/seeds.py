"""Seeds as a user writes them, and each of them in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from tests.fork_server import ProcessOnCpu
from tests.fuzz.outcome import Outcome
from tests.warm_process import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_GAUDI_UCM_DEVICE": "cpu",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""The environment of a seed's process. Workers fork from it, before it has computed anything, and with one thread."""


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Seeds in their order: numbers and ranges, `1..100`, both ends included. Raises ValueError."""
    seeds: list[int] = []
    for text in " ".join(texts).replace(",", " ").split():
        first, dots, last = text.partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()) or (dots and int(last) < int(first)):
            raise ValueError(f"SEEDS={text}: expected numbers and ranges such as 3 7 10..20")
        seeds += range(int(first), int(last if dots else first) + 1)
    if not seeds:
        raise ValueError("SEEDS is empty: expected numbers and ranges such as 3 7 10..20")
    return list(dict.fromkeys(seeds))


class SeedProcesses:
    """Runs seeds, each in a new process: one that crashes or hangs is a failure of its own seed.

    Args:
        timeout: seconds that a seed may take.
        pins: draws that are no draws, by name.
        logs: folder for the logs of seeds that fail.
    """

    def __init__(self, timeout: float, pins: Mapping[str, str] | None = None, logs: Path | None = None) -> None:
        self._timeout, self._pins, self._logs = timeout, dict(pins or {}), logs
        # the first process starts a server of forks
        self._starting = threading.Lock()
        self._live: set[WarmProcess] = set()

    def run(self, seed: int) -> Outcome:
        """The outcome of a seed."""
        with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            log = folder / "log"
            env = {**os.environ, **ENVIRONMENT}
            env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            arguments = (seed, self._pins, str(folder))
            with self._starting, _errors_to(log):
                process = WarmProcess(_run_seed, arguments, log=log, env=env, cwd=ROOT, kind=ProcessOnCpu)
                self._live.add(process)
            outcome = self._outcome(seed, process, folder)
            self._live.discard(process)
            if not outcome.passed and self._logs is not None:
                self._logs.mkdir(parents=True, exist_ok=True)
                kept = self._logs / f"seed-{seed}.log"
                shutil.copy(log, kept)
                outcome.problems.append(f"log: {kept}")
        return outcome

    def stop(self) -> None:
        """Ends all seeds that run."""
        with self._starting:
            for process in list(self._live):
                _kill(process)

    def _outcome(self, seed: int, process: WarmProcess, folder: Path) -> Outcome:
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            problem = f"no end within {self._timeout:.0f} s"
        else:
            problem = f"the process ended with status {status}"
        _kill(process)
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((folder / "outcome.json").read_bytes(), type=Outcome)
        last = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()][-3:]
        return Outcome(seed, problems=[problem, *last], seconds=self._timeout)


def run_seeds(seeds: Sequence[int], processes: SeedProcesses, jobs: int) -> Iterator[Outcome]:
    """Outcomes as they come; `jobs` seeds run at a time. Seeds that run end with the iteration."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(processes.run, seed) for seed in seeds]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()
            processes.stop()


@contextlib.contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Servers of forks start with the first process, and what they write at their end is of no use on a terminal."""
    terminal = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _run_seed(seed: int, pins: dict[str, str], folder: str) -> None:
    """In the new process; the one that starts it does without torch and vLLM."""
    from tests.fuzz.seed_run import write_outcome

    write_outcome(seed, pins, folder)


def _kill(process: WarmProcess) -> None:
    """The process, and the workers that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
