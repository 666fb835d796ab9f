"""The machine's C++ compiler, run so that its arguments alone decide what it makes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from vllm_gaudi_ucm.envs import environment_without

COMPILERS = ("g++", "c++")
TIMEOUT_S = 120.0
MOST_AT_ONCE = 4  # a compiler takes some 200 MB, while the model is loaded
# Where GCC and the linker look for headers, libraries and their own parts, what they add, and what a run writes beside.
NOT_PASSED = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LD_RUN_PATH",
    "LDEMULATION",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "SOURCE_DATE_EPOCH",
)
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message says which and what it said."""


class CacheError(BuildError):
    """The folder cannot be built in or loaded from; another one may do. The message says which, and what to do."""


class _Job(NamedTuple):
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    deadline: float


def find_compiler() -> str:
    """Its path. Raises BuildError."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")
    return compiler


def identity(compiler: str) -> tuple[str, ...]:
    """What tells one compiler from another: its file and, for that may be a wrapper, what it says of its version."""
    file = Path(compiler).resolve()
    status = file.stat()
    try:
        asked = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} --version did not finish in {TIMEOUT_S:.0f} s") from None
    return str(file), str(status.st_size), str(status.st_mtime_ns), asked.stdout


def run(commands: Sequence[Sequence[str]], work: Path) -> None:
    """Runs compilers, begun in this order, on all cores. work: a folder for what they write meanwhile.

    Raises BuildError where one fails, CacheError where that is for want of room; the others are ended then.
    """
    environment = {**environment_without(NOT_PASSED), "LC_ALL": "C", "TMPDIR": str(work)}
    at_once = min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)
    waiting, running = list(reversed(commands)), list[_Job]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(), environment))
            time.sleep(0.005)
            running = [job for job in running if not _has_finished(job)]
    finally:
        for job in running:
            job.process.kill()
            job.process.wait()


def _start(command: Sequence[str], environment: dict[str, str]) -> _Job:
    # in memory: on a full disk it could not say that the disk is full
    said = os.fdopen(os.memfd_create("said"), "w+b")
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    return _Job(process, said, time.monotonic() + TIMEOUT_S)


def _has_finished(job: _Job) -> bool:
    """Raises what a compiler's failure means."""
    compiler = str(job.process.args[0])  # type: ignore[index]  # a list, as it was given
    status = job.process.poll()
    if status is None:
        if time.monotonic() > job.deadline:
            raise BuildError(f"{compiler} did not finish in {TIMEOUT_S:.0f} s")
        return False
    with job.said as said:
        said.seek(0)
        text = said.read().decode(errors="replace").strip()[-2000:]
    if status:
        kind = CacheError if any(words in text for words in _NO_ROOM) else BuildError
        raise kind(f"{compiler} failed: {text or f'status {status}'}")
    return True
