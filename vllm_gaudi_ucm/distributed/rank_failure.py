"""A call that fails in one of several workers ends the engine, whichever worker it is."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.logger import plugin_logger

# a process that was killed closes its connections before it is seen to be gone
GONE_SECONDS = 1.0

logger = plugin_logger(__name__)


class RankFailedError(RuntimeError):
    """What one of several workers raised, with its rank."""


@dataclass(frozen=True)
class Peers:
    """The other workers of an engine, as far as they are processes of this machine.

    processes: their ids, by rank.
    """

    rank: int
    size: int
    processes: Mapping[int, int]

    @classmethod
    def of(cls, ranks: Ranks) -> Peers:
        """Asks all ranks."""
        machine = _machine()
        found = [text.rpartition(" ") for text in ranks.texts(f"{machine} {os.getpid()}")]
        here = {rank: int(process) for rank, (theirs, _, process) in enumerate(found) if theirs == machine}
        here.pop(ranks.rank)
        return cls(ranks.rank, ranks.size, here)

    def gone(self) -> list[int]:
        """Ranks whose processes have ended."""
        return [rank for rank, process in self.processes.items() if _is_gone(process)]


def _machine() -> str:
    """Where process ids mean the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}" if boot.exists() else os.uname().nodename


def _is_gone(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def ends_engine(call: Callable[..., Any], peers: Peers, answering_rank: int) -> Callable[..., Any]:
    """The call, whose errors name the rank and end the engine.

    vLLM's executor waits for the answer of one rank first, or of one alone. An error of another is logged there and
    nobody hears of it, while the rank that should answer waits in a collective: that worker's process ends, which the
    executor notices.

    answering_rank: the one whose answer the executor reads first.
    """

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            _fail(peers, call.__name__, error, peers.rank == answering_rank)

    return guarded


def _fail(peers: Peers, call: str, error: Exception, answers: bool) -> NoReturn:
    what = (
        f"rank {peers.rank} of {peers.size} (process {os.getpid()}) failed in {call}: {type(error).__name__}: {error}"
    )
    deadline = time.monotonic() + GONE_SECONDS
    while not (gone := peers.gone()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if gone:
        # whose end is the cause, and this error a collective that has lost them
        ended = ", ".join(f"rank {rank} of {peers.size} (process {peers.processes[rank]})" for rank in gone)
        what = f"{ended} ended: killed, or by an error of its own. Then {what}"
    if answers:
        raise RankFailedError(what) from error
    logger.error("%s; this worker ends, and the engine with it", what, exc_info=error)
    raise SystemExit(1)
