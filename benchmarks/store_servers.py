"""A Redis server of a benchmark's own, on a socket in a folder."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def redis_server(folder: Path) -> Iterator[Path | None]:
    """The path of its socket; None if no redis-server is installed. It writes nothing to disk."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    socket = folder / "redis.sock"
    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while not socket.exists():
            if time.monotonic() > end or server.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)
        yield socket
    finally:
        server.terminate()
        server.wait(10)
