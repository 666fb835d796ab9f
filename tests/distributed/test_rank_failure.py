"""An error in one of several workers: told by the rank that answers, the end of any other."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from vllm_gaudi_ucm.device.cpu import CpuDevice
from vllm_gaudi_ucm.distributed import rank_failure
from vllm_gaudi_ucm.distributed.rank_failure import DeviceWatch, Peers, RankFailedError, RankGuard, ends_engine
from vllm_gaudi_ucm.distributed.ranks import ALONE
from vllm_gaudi_ucm.vllm_api.steps import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput


def execute_model(tokens: int) -> int:
    if tokens < 0:
        raise MemoryError("no room for the step")
    return tokens


def test_the_rank_that_answers_names_itself() -> None:
    call = ends_engine(execute_model, RankGuard(Peers(2, 4, {1: os.getpid()}), answers=True))
    assert call(7) == 7
    with pytest.raises(RankFailedError, match=r"^rank 2 of 4 \(process \d+\) failed in execute_model: MemoryError: no"):
        call(-1)


def test_another_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error would be logged, and the rank that answers would wait for it. It ends even if closing down hangs."""
    ended = threading.Event()
    # as it is, it would end the process of the tests
    monkeypatch.setattr(rank_failure, "_end_now", ended.set)
    monkeypatch.setattr(rank_failure, "END_SECONDS", 0.01)
    with pytest.raises(SystemExit, match="1"):
        ends_engine(execute_model, RankGuard(Peers(1, 4, {}), answers=False))(tokens=-1)
    assert ended.wait(30)


def test_the_error_names_a_rank_that_was_killed_before() -> None:
    """Its own is that of a collective. A process that its parent has not asked for yet counts, too."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = Peers(0, 2, {1: other.pid})
    try:
        begin = time.monotonic()
        while peers.gone() and time.monotonic() - begin < 60:
            time.sleep(0.01)
        assert peers.gone() == []
        other.kill()
        wanted = rf"^rank 1 of 2 \(process {other.pid}\) ended: .* Then rank 0 of 2 .* MemoryError"
        with pytest.raises(RankFailedError, match=wanted):
            ends_engine(execute_model, RankGuard(peers, answers=True))(-1)
    finally:
        other.kill()
        other.communicate()
    assert peers.gone() == [1]


def test_one_worker_has_no_peers() -> None:
    assert Peers.from_ranks(ALONE) == Peers(0, 1, {})


class LateOutput(AsyncModelRunnerOutput):
    """The output of a step that fails when it is read."""

    def get_output(self) -> ModelRunnerOutput:
        raise RuntimeError("device-side assert triggered")

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return REPORTED


REPORTED = KVConnectorOutput(finished_recving={"a"})


def late_output() -> AsyncModelRunnerOutput:
    return LateOutput()


def test_an_output_that_is_read_later_names_its_rank() -> None:
    guarded = ends_engine(late_output, RankGuard(Peers(0, 2, {}), answers=True))()
    assert isinstance(guarded, AsyncModelRunnerOutput)
    with pytest.raises(RankFailedError, match=r"^rank 0 of 2 .* failed when the output of a step was read: RuntimeErr"):
        guarded.get_output()
    # vLLM 0.33 asks for it then
    output: Any = guarded
    assert output.get_kv_connector_output() is REPORTED


class BrokenDevice(CpuDevice):
    """Takes a step, and fails behind it."""

    def fence(self) -> Any:
        return self

    def query(self) -> bool:
        raise RuntimeError("device-side assert triggered")


def test_a_device_that_fails_behind_a_step_is_noticed_without_a_call() -> None:
    """The executor reads another rank, and sends no further step before that one has answered."""
    errors: list[Exception] = []
    watch = DeviceWatch(BrokenDevice(), errors.append)
    assert watch.look()
    assert ends_engine(execute_model, RankGuard(Peers(1, 2, {}), answers=False), watch)(3) == 3
    assert not watch.look()
    assert [str(error) for error in errors] == ["device-side assert triggered"]


def _fail_in_a_thread() -> None:
    guard = RankGuard(Peers(1, 2, {}), answers=False)
    watch = DeviceWatch(BrokenDevice(), partial(guard.fail, "on its device"))
    watch.queued()
    watch.start()
    threading.Event().wait(60)


def test_a_process_ends_whose_main_thread_waits() -> None:
    process = multiprocessing.get_context("fork").Process(target=_fail_in_a_thread)
    process.start()
    process.join(60)
    assert process.exitcode == 1
