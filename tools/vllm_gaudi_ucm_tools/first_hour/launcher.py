"""Runs a function of a probe in a new process, and listens until it ends, dies, or takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm_tools.first_hour.result import Ending, Event

CHILD = "vllm_gaudi_ucm_tools.first_hour.child"
LOG_LINES = 400  # of the end of a process's output
LONGEST_LINE = 2000
GRACE_S = 5.0
DRAIN_S = 2.0


def run_apart(request: Mapping[str, Any], changes: Mapping[str, str | None], limit_s: float) -> Ending:
    """Starts `child.py` with a request and waits for its end.

    The process is new (nothing is forked), leads a session of its own, and gets SIGTERM, then SIGKILL, with all of its
    children when `limit_s` seconds have passed. Its results come through pipes, so that a full disk loses nothing.

    request: sent as JSON; see `child.py`. changes: environment variables to set, or to remove (None). KeyboardInterrupt
    ends the process, and sets `Ending.interrupted`.
    """
    begin = time.monotonic()
    try:
        talk = _Talk(request, changes)
    except OSError as error:
        return Ending(1, [], f"the process could not be started: {error}", 0.0)
    interrupted = False
    try:
        status: int | None = talk.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    except KeyboardInterrupt:
        status, interrupted = None, True
    talk.end(gently=status is None)
    return Ending(status, talk.events, "\n".join(talk.lines), time.monotonic() - begin, interrupted)


class _Talk:
    """A process that runs, and the two threads that listen to it."""

    def __init__(self, request: Mapping[str, Any], changes: Mapping[str, str | None]) -> None:
        self.events: list[Event] = []
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        environment = envs.environment_without([name for name, value in changes.items() if value is None])
        environment |= {name: value for name, value in changes.items() if value is not None}
        said, say = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",
                    "-m",
                    CHILD,
                    str(say),
                    json.dumps({**request, "parent": os.getpid()}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=Path.cwd(),
                pass_fds=(say,),
                start_new_session=True,
            )
        except OSError:
            os.close(said)
            raise
        finally:
            os.close(say)
        assert self.process.stdout is not None
        self._threads = [
            _listen(os.fdopen(said, "rb"), self._hear),
            _listen(self.process.stdout, lambda line: self.lines.append(line.rstrip("\n")[:LONGEST_LINE])),
        ]

    def _hear(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # a line that a dying process has not finished
            event = json.loads(line)
            if isinstance(event, dict) and "kind" in event:
                self.events.append(event)

    def end(self, gently: bool) -> None:
        """Ends the process and its children, as far as they still run."""
        if gently:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for thread in self._threads:
            thread.join(DRAIN_S)

    def _signal(self, number: int) -> None:
        # the group outlives its leader if a child of it does
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _listen(pipe: IO[bytes], hear: Callable[[str], None]) -> threading.Thread:
    def listen() -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                hear(line.decode("utf-8", "replace"))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    return thread
