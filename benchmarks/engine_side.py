"""One side of an engine comparison: its interpreter, its environment, and its worker process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("engine_worker.py")


class SideFailed(RuntimeError):
    """Raised if a worker died or stopped answering; the message has the end of its output."""


@dataclass
class EngineSide:
    """A worker that computes only while it answers: between answers its whole process group is stopped.

    Stopping matters because an idle engine may spin (OpenMP threads after a parallel region, readers of shared
    memory), which would slow the other side on a machine of few cores.
    """

    name: str
    python: Path
    engine_args: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: Path = WORKER
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log = Path()

    def start(self) -> tuple[float, dict[str, Any]]:
        """Start the worker; seconds from process start to its first token, and the versions it reports."""
        handle, name = tempfile.mkstemp(prefix=f"engine-{self.name}-", suffix=".log")
        self._log = Path(name)
        start = time.perf_counter()
        with os.fdopen(handle, "w") as log:
            self._process = subprocess.Popen(
                # -P: the worker's folder holds our benchmarks, which must not shadow a module of the peer.
                [str(self.python), "-P", str(self.worker), json.dumps(dict(self.engine_args))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()
        ready = self._read()
        seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)
        return seconds, ready

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Let the worker compute one order, and stop it again."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(dict(order)) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_seconds(self) -> float:
        """Returns CPU seconds of the worker and all its running child processes, including spinning threads."""
        assert self._process is not None
        spent = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self._process.pid:
                spent += int(fields[11]) + int(fields[12])
        return spent / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the worker and every process it started."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGCONT, signal.SIGKILL):
            if process.poll() is None or number == signal.SIGKILL:
                _signal_group(process.pid, number)
        process.wait()
        self._log.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self.timeout_s)
        except queue.Empty:
            raise self._failure(f"said nothing for {self.timeout_s:.0f} s") from None
        if not line:
            raise self._failure("ended")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _failure(self, what: str) -> SideFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return SideFailed(f"the worker of {self.name} ({self.python}) {what}; the end of its output:\n{tail}")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        _signal_group(self._process.pid, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _forward(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Forwards each line of the worker; an empty one means that it ended."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")
