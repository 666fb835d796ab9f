"""Measures in a tenth of a second whether other programs compute on this machine's cores."""

import os
import time
from pathlib import Path

from vllm_gaudi_ucm.device.host_limits import Cores, find_cores
from vllm_gaudi_ucm.envs import let_idle_threads_wait_briefly, waiting_is_chosen

WINDOW_SECONDS = 0.1
# Idle threads of few cores are woken at once: giving up their cores early costs nothing, whatever program starts later.
FEW_CORES = 4
# The share of the cores that others use when the machine counts as shared.
SHARED_FROM = 1 / 8


def choose_waiting() -> None:
    """Decides how idle threads of the processes that this one starts wait: they inherit it. A choice that is made
    stays, and nothing is measured for it."""
    if waiting_is_chosen():
        return
    cores = find_cores()
    if is_shared(cores):
        let_idle_threads_wait_briefly(cores.usable)


def is_shared(cores: Cores, busy: float | None = None) -> bool:
    """Returns whether idle threads should give up their cores soon.

    Always true for few cores, and under a quota of CPU time, which waiting threads would use up.
    busy: how many cores others use; None: measured, if it decides.
    """
    if cores.affinity <= FEW_CORES or cores.usable < cores.affinity:
        return True
    return (busy_cores() if busy is None else busy) >= SHARED_FROM * cores.usable


def busy_cores(seconds: float = WINDOW_SECONDS, stat: Path = Path("/proc/stat")) -> float:
    """Returns how many of this process's cores other processes use; 0.0 if the system does not tell.

    seconds: duration of the measurement. stat: the file to read; another one in tests.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0.0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    before, own, begin = _busy_seconds(stat, names), time.process_time(), time.perf_counter()
    time.sleep(seconds)
    after, passed = _busy_seconds(stat, names), time.perf_counter() - begin
    return max(0.0, after - before - (time.process_time() - own)) / passed


def _busy_seconds(stat: Path, names: set[str]) -> float:
    """Seconds since the system's start in which these CPUs were neither idle nor waiting for a disk."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0.0  # not Linux
    # user nice system idle iowait irq softirq steal, and then the guests' part of user and nice
    ticks = [list(map(int, words[1:9])) for words in lines if words and words[0] in names]
    return sum(sum(times) - sum(times[3:5]) for times in ticks) / os.sysconf("SC_CLK_TCK")
