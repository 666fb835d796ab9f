"""A call that fails in one of several workers ends the engine, whichever worker it is."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from vllm_gaudi_ucm.device import Device, Fence
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.steps import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

# a process that was killed closes its connections before it is seen to be gone
GONE_SECONDS = 1.0
LOOK_SECONDS = 1.0
# for stores, which have five seconds for their writes and five for their threads
END_SECONDS = 10.0

logger = plugin_logger(__name__)


class RankFailedError(RuntimeError):
    """An error of one of several workers, with its rank."""


@dataclass(frozen=True)
class Peers:
    """The other workers of an engine, as far as they are processes of this machine.

    processes: their ids, by rank.
    """

    rank: int
    size: int
    processes: Mapping[int, int]

    @classmethod
    def from_ranks(cls, ranks: Ranks) -> Peers:
        """Gathers the values of all ranks."""
        machine = _machine()
        found = [text.rpartition(" ") for text in ranks.texts(f"{machine} {os.getpid()}")]
        here = {rank: int(process) for rank, (theirs, _, process) in enumerate(found) if theirs == machine}
        here.pop(ranks.rank)
        return cls(ranks.rank, ranks.size, here)

    def gone(self) -> list[int]:
        """Ranks whose processes have ended."""
        return [rank for rank, process in self.processes.items() if _is_gone(process)]


def _machine() -> str:
    """Identifies the machine within which process ids are valid."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}" if boot.exists() else os.uname().nodename


def _is_gone(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


class DeviceWatch:
    """Notices that the device of a worker has failed whose results the executor does not read.

    A kernel that fails is noticed by a call that waits for it. The executor reads the results of one worker and sends
    no further step before it has them, and that worker waits for the failed one in a collective.

    failed: called once with the error, in a thread of the watch.
    """

    def __init__(self, device: Device, failed: Callable[[Exception], object]) -> None:
        self._device = device
        self._failed = failed
        self._fence: Fence | None = None

    def start(self) -> None:
        """Looks once every `LOOK_SECONDS` from now on."""
        threading.Thread(target=self._look_for_ever, name="gaudi-ucm-device-watch", daemon=True).start()

    def queued(self) -> None:
        """Notes the work that this thread has launched so far."""
        self._fence = self._device.fence()

    def look(self) -> bool:
        """True if the device works; reports it if not."""
        try:
            if self._fence is not None:
                self._fence.query()
        except Exception as error:
            self._failed(error)
            return False
        return True

    def _look_for_ever(self) -> None:
        self._device.enter_thread()
        while self.look():
            time.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class RankGuard:
    """Decides how far an error in one of several workers reaches.

    answers: whether the executor reads this worker's answer first.
    """

    peers: Peers
    answers: bool

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raises `RankFailedError`, or ends the process, if the executor does not wait for this worker."""
        text = self._describe(what, error)
        if self.answers:
            raise RankFailedError(text) from error
        logger.error("%s; this worker ends, and the engine with it", text, exc_info=error)
        if threading.current_thread() is not threading.main_thread():
            _end_now()
        # closing collectives may wait for the other ranks
        timer = threading.Timer(END_SECONDS, _end_now)
        timer.daemon = True
        timer.start()
        raise SystemExit(1)

    def _describe(self, what: str, error: Exception) -> str:
        peers = self.peers
        text = (
            f"rank {peers.rank} of {peers.size} (process {os.getpid()}) failed {what}: {type(error).__name__}: {error}"
        )
        deadline = time.monotonic() + GONE_SECONDS
        while not (gone := peers.gone()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not gone:
            return text
        # whose end is the cause, and this error a collective that has lost them
        ended = ", ".join(f"rank {rank} of {peers.size} (process {peers.processes[rank]})" for rank in gone)
        return f"{ended} ended: killed, or by an error of its own. Then {text}"


def _end_now() -> NoReturn:
    """Ends the process without its exit handlers, which may wait for a device that has failed, or for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


class GuardedOutput(AsyncModelRunnerOutput):
    """The output of a step that is read later, by a thread of vLLM, under the guard of the call that queued it."""

    def __init__(self, output: AsyncModelRunnerOutput, guard: RankGuard) -> None:
        self._output = output
        self._guard = guard

    def get_output(self) -> ModelRunnerOutput:
        try:
            return self._output.get_output()
        except Exception as error:
            self._guard.fail("when the output of a step was read", error)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Returns what the step's KV connector has reported. vLLM 0.33 reads it after `get_output` has failed."""
        # vLLM 0.32 has no such method
        output: Any = self._output
        found: KVConnectorOutput | None = output.get_kv_connector_output()
        return found


def ends_engine(call: Callable[..., Any], guard: RankGuard, watch: DeviceWatch | None = None) -> Callable[..., Any]:
    """Makes errors of a call, and of an output that is read later, name the rank and end the engine.

    vLLM's executor waits for the answer of one rank first, or of only one. It merely logs an error of another, while
    the rank that should answer waits in a collective. So the process of the failed worker ends, which the executor
    notices.

    watch: notes the work that the call has launched on the device.
    """

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            output = call(*args, **kwargs)
            if watch is not None:
                watch.queued()
        except Exception as error:
            guard.fail(f"in {call.__name__}", error)
        return GuardedOutput(output, guard) if isinstance(output, AsyncModelRunnerOutput) else output

    return guarded
