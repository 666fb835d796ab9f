"""Whether others compute on this machine's cores."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from vllm_gaudi_ucm.device import shared_machine
from vllm_gaudi_ucm.device.host_limits import Cores
from vllm_gaudi_ucm.device.shared_machine import busy_cores, choose_waiting, is_shared


@pytest.mark.parametrize(
    ("affinity", "quota", "busy", "shared"),
    [
        (2, None, 0.0, True),
        (16, None, 0.0, False),
        (16, None, 1.9, False),
        (16, None, 2.0, True),
        (16, 8.0, 0.0, True),
        (128, None, 2.0, False),
    ],
    ids=["few cores", "quiet", "a little", "an eighth", "quota", "many cores"],
)
def test_threads_give_up_cores_that_are_few_or_wanted(
    affinity: int, quota: float | None, busy: float, shared: bool
) -> None:
    assert is_shared(Cores(128, affinity, quota), busy) is shared


def test_few_cores_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gaudi_ucm.device.shared_machine.busy_cores", lambda: pytest.fail("measured"))
    assert is_shared(Cores(2, 2, None))


def _line(core: int, busy: int, idle: int) -> str:
    # user nice system idle iowait irq softirq steal guest guest_nice
    return f"cpu{core} {busy} 0 0 {idle} 3 0 0 0 7 7"


def test_only_cores_of_this_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    tick = os.sysconf("SC_CLK_TCK")

    def write(first: int, second: int) -> None:
        stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", _line(0, first, 900), _line(1, second, 900), "intr 5"]))

    write(0, 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    # a second of work on each core while a tenth passes
    monkeypatch.setattr(time, "sleep", lambda _: write(tick, tick))
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    assert busy_cores(0.5, stat) == pytest.approx(2.0)


def test_a_system_that_does_not_say_it_counts_as_quiet(tmp_path: Path) -> None:
    assert busy_cores(0.0001, tmp_path / "missing") == 0.0


def _compute(end: float) -> None:
    while time.monotonic() < end:
        pass


def test_a_busy_process_is_seen() -> None:
    other = multiprocessing.get_context("spawn").Process(target=_compute, args=(time.monotonic() + 60,))
    other.start()
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end and (found := busy_cores(0.5)) < 0.3:
            pass
    finally:
        other.kill()
        other.join()
    assert found >= 0.3


WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in WAITING if name in os.environ}


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says how threads wait; what a test has set is taken away again."""
    for name in WAITING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unchosen")
@pytest.mark.parametrize(("shared", "expected"), [(True, {"GOMP_SPINCOUNT": "8000"}), (False, {})])
def test_the_default_stays_on_a_machine_of_ones_own(
    shared: bool, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_machine, "find_cores", lambda: Cores(16, 16, None))
    monkeypatch.setattr(shared_machine, "is_shared", lambda _: shared)
    choose_waiting()
    assert chosen() == expected


@pytest.mark.usefixtures("unchosen")
def test_a_choice_that_is_made_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(shared_machine, "is_shared", lambda _: pytest.fail("measured"))
    choose_waiting()
    assert chosen() == {"OMP_WAIT_POLICY": "passive"}
