"""A process that forks from one with everything imported: it starts in a second, where `python -c` takes eight.

Otherwise it is as new as any: it has an environment, a log and children of its own, and no device was asked for yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.fork_server import WARM, ProcessOnCpu


class WarmProcess:
    """Calls a module's function in a new process; the methods are those of `subprocess.Popen`.

    Args:
        function: called with `arguments`.
        log: takes everything that the process and its children print.
        env: the whole environment.
        cwd: where it runs.
        kind: what it forks from: `ProcessOnCpu` and `ProcessOnCard` have found their device, too, and imported vLLM.
    """

    def __init__(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        kind: type[ForkServerProcess] = WARM.Process,
    ) -> None:
        log.touch()
        self._process = kind(target=_run, args=(function, arguments, str(log), dict(env), str(cwd)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def finish(self, seconds: float) -> int:
        """The exit status; a process that takes longer is killed. Raises subprocess.TimeoutExpired."""
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # as Popen: it has ended, and its status is on its way to us
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def kind_of_device() -> type[ForkServerProcess]:
    """What a process forks from whose device is this one's: from one with vLLM where that has found only a CPU."""
    from vllm.platforms import current_platform  # not before a process has the environment that decides

    return ProcessOnCpu if current_platform.device_type == "cpu" else WARM.Process


def _run(function: Callable[..., None], arguments: tuple[Any, ...], log: str, env: dict[str, str], cwd: str) -> None:
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    function(*arguments)
