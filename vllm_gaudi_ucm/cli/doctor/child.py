"""A child process of the doctor, which may crash or hang: its output, and how it ended."""

import subprocess
import sys
from typing import NamedTuple


class Ending(NamedTuple):
    """stdout: None if there was no end within the time. how: such as "ended with code 1: the last line"."""

    stdout: str | None
    how: str


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Runs a module of the doctor in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def ending_of(child: subprocess.Popen[str], timeout: float) -> Ending:
    """Waits for it; kills it after `timeout` seconds."""
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Ending(None, "no end within the time")
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "nothing on stderr")
    return Ending(stdout, f"ended with code {child.returncode}: {last}")
