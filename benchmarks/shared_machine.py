"""Decode steps of whole engines on a shared machine: with the plugin's way of waiting, and with others.

Each engine is a process of its own and computes in turn with the others, first alone, then with a busy process for each
core. `python -m benchmarks.shared_machine`; the figures are milliseconds of a step, the median of all turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine import DEFAULT_MODEL, add_peer_option, make_sides
from benchmarks.engine_side import EngineSide
from benchmarks.engine_workloads import Workload
from benchmarks.machine import describe_machine
from benchmarks.positive import positive

# environment of each engine; OpenMP's own way applies if a user sets its default
WAYS = {
    "ours": {},
    "OpenMP's default": {"GOMP_SPINCOUNT": "300000"},
    "spins 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spins 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spins 100": {"GOMP_SPINCOUNT": "100"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEPS = 24


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    ours, *peers = make_sides(args.model, args.peer_python, args.dtype)
    named = {way: {**ours.environment, **WAYS[way]} for way in args.ways}
    sides = [EngineSide(way, ours.python, ours.engine_args, environment) for way, environment in named.items()]
    sides += peers
    found: dict[tuple[str, int, str], list[float]] = {}
    # the engines are stopped, in process groups of their own: a signal that ends us has to end them first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for side in sides:
            side.start()
        for load in ("quiet", "busy"):
            with busy_processes(len(os.sched_getaffinity(0)) if load == "busy" else 0):
                for turn in range(-1, args.repeats):
                    for requests in args.requests:
                        _turn(sides, requests, turn, load, found)
    finally:
        for side in sides:
            side.stop()
    _report(sides, args, found)
    return 0


def _turn(
    sides: Sequence[EngineSide], requests: int, turn: int, load: str, found: dict[tuple[str, int, str], list[float]]
) -> None:
    work = Workload(f"{load} {requests}", requests, 32, STEPS, goal=1.0, is_decode=True)
    order = {"prompts": work.prompts(turn), "output_tokens": STEPS, "is_decode": True}
    for side in sides:
        seconds = side.ask(order)["seconds"]
        print(f"{load}, {requests} requests, {side.name}: {seconds / STEPS * 1e3:.1f} ms a step", file=sys.stderr)
        if turn >= 0:
            found.setdefault((side.name, requests, load), []).append(seconds / STEPS * 1e3)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs this many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _report(
    sides: Sequence[EngineSide], args: argparse.Namespace, found: dict[tuple[str, int, str], list[float]]
) -> None:
    table = Table(title="ms a step", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    columns = [(requests, load) for load in ("quiet", "busy") for requests in args.requests]
    for requests, load in columns:
        table.add_column(f"{load}, {requests}", justify="right", no_wrap=True)
    for side in sides:
        figures = (found[side.name, requests, load] for requests, load in columns)
        table.add_row(side.name, *(f"{statistics.median(one):.1f} ({min(one):.1f})" for one in figures))
    console = Console(highlight=False)
    console.print(f"{describe_machine()}; {args.model.name}, {args.dtype}; load {os.getloadavg()[0]:.1f}", style="dim")
    console.print(table)
    console.print("in brackets: the least; busy: a process that computes without end for each core", style="dim")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_machine", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the model")
    add_peer_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 16], help="that decode at once")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of each engine")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="engines to compare")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
