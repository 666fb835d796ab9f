"""Chooses how many threads a worker computes with on the CPU, and how idle ones wait."""

from typing import NamedTuple

from vllm_gaudi_ucm.device.host_limits import Cores


class ThreadChoice(NamedTuple):
    """The number of threads of a worker, and the reason in words for a log."""

    threads: int
    reason: str


def choose_threads(found: int, cores: Cores, workers: int, asked: int | None, variable: str | None) -> ThreadChoice:
    """A thread for each core that this worker may have, unless the user said how many.

    found: threads that torch has now, at most one for each physical core. workers: of all engines of this server on
        this machine, which share the cores. asked: `ucm.cpu.threads`. variable: the user's `OMP_NUM_THREADS`.
    """
    if asked is not None:
        return ThreadChoice(asked, "ucm.cpu.threads")
    if variable is not None:
        return ThreadChoice(found, f"OMP_NUM_THREADS={variable}")
    share = max(1, cores.usable // workers)
    names = [f"{cores.usable} usable core{'s' * (cores.usable > 1)}"]
    if cores.quota is not None and cores.usable < cores.affinity:
        names.append(f"a quota of {cores.quota:g}")
    if cores.affinity < cores.machine:
        names.append(f"an affinity to {cores.affinity} of {cores.machine}")
    if workers > 1:
        names.append(f"{workers} workers that share them")
    return ThreadChoice(min(found, share), ", ".join(names))


def waiting_in_words(variables: dict[str, str]) -> str:
    """Describes how idle threads wait, for a log. variables: those that OpenMP read when this process started."""
    if variables:
        return "idle ones wait by " + ", ".join(f"{name}={value}" for name, value in variables.items())
    return (
        "idle ones keep their cores for milliseconds, which is slow on a shared machine: set GOMP_SPINCOUNT=1000 "
        "before this program starts"
    )
