"""A real Redis server on a free loopback port, which a test may kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis

from tests.ports import free_port

PROGRAM = "redis-server"


class ServerEndedError(RuntimeError):
    """The server ended while it started."""


class RedisServer:
    """A server without persistence: it comes back empty."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for attempt in range(5):  # another process may take the port before the server does
            self.port = free_port()
            try:
                self.start()
                break
            except ServerEndedError:
                if attempt == 4:
                    raise
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        fixed = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command = [PROGRAM, *fixed, "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None:
                raise ServerEndedError(f"{' '.join(command)} ended with {self._process.returncode}")
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash: no goodbye to anybody."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """It stays connected and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=60)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False


def needs_redis() -> None:
    """Skips where there is no server to start, except on a machine that must have one."""
    if shutil.which(PROGRAM) is None:
        what = f"{PROGRAM} is not on PATH; on Debian and Ubuntu it is the package redis-server"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(what)
        pytest.skip(what)
