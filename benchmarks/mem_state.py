"""Compares two ways to take and return slots: the host's runs of ids, and a state on the device.

`python -m benchmarks.mem_state [--slots N] [--device cpu]`. Both allot the same prompts and the same single tokens, in
turn, to requests that come and go. On a device the host waits for the slots, which its scheduler has to send.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.device_slots import give_slots, new_state, take_slots
from benchmarks.positive import positive
from vllm_gaudi_ucm.block_policies.compaction.free_runs import NO_BLOCK
from vllm_gaudi_ucm.block_policies.id_runs import IdRuns
from vllm_gaudi_ucm_tools.output import report_console

MOST = 2048
"""Slots taken at once, at most: the static shape of a result."""


class HostSlots:
    """Slots of the host's allocator."""

    def __init__(self, slots: int) -> None:
        self._runs = IdRuns(range(1, slots))

    def take(self, count: int) -> list[int]:
        return self._runs.take(count, NO_BLOCK, count)

    def give(self, slots: list[int]) -> None:
        self._runs.add(slots)


class DeviceSlots:
    """Slots by the state on a device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._state = new_state(slots, device)
        self._device = device

    def take(self, count: int) -> list[int]:
        found, self._state = take_slots(self._state, torch.tensor(count, device=self._device), min(MOST, count))
        return found.tolist()

    def give(self, slots: list[int]) -> None:
        self._state = give_slots(self._state, torch.tensor(slots, device=self._device))


class _Clock:
    """Seconds of one side, by operation."""

    def __init__(self, times: dict[tuple[str, str], list[float]], side: str) -> None:
        self._times = times
        self._side = side

    def time(self, what: str, act: Callable[[Any], Any], argument: Any) -> Any:
        begin = time.perf_counter()
        found = act(argument)
        self._times.setdefault((what, self._side), []).append(time.perf_counter() - begin)
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=positive, default=65_536, help="default: %(default)s")
    parser.add_argument("--requests", type=positive, default=300, help="that come and go (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device of the state (default: %(default)s)")
    args = parser.parse_args(argv)
    sides = {"host": HostSlots(args.slots), "device": DeviceSlots(args.slots, torch.device(args.device))}
    held: dict[str, list[list[int]]] = {side: [] for side in sides}
    times: dict[tuple[str, str], list[float]] = {}
    rng = random.Random(0)

    for _ in range(args.requests):
        prompt, leaves, end = rng.randint(1, 880), rng.random(), rng.random()
        for side, slots in sides.items():
            clock = _Clock(times, side)
            own = clock.time("a prompt", slots.take, prompt)
            for _ in range(4):
                own += clock.time("a token", slots.take, 1)
            held[side].append(own)
            if leaves < 0.5 or len(held[side]) > args.slots // 1000:
                clock.time("a request's end", slots.give, held[side].pop(int(end * len(held[side]))))
    table = Table("what", "host, us", f"{args.device}, us", "")
    for what in ("a prompt", "a token", "a request's end"):
        host, device = (1e6 * statistics.median(times[what, side]) for side in sides)
        table.add_row(what, f"{host:.1f}", f"{device:.1f}", f"{device / host:.1f}x")
    report_console(least_width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
