"""Random engines: `make fuzz SEEDS=1..100`, or `python -m tests.fuzz 3 7 10..20 --jobs 2`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.fuzz.outcome import Outcome
from tests.fuzz.seeds import ROOT, SeedProcesses, parse_seeds, run_seeds

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs seeds. Returns 0 if all passed, 1 if one failed, 2 for wrong arguments, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        seeds = parse_seeds(options.seeds)
        pins = _pins(options.pin)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # as in pytest's processes: what they start waits without taking the core
    path = (str(ROOT / "tests/children"), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    processes = SeedProcesses(options.timeout, pins, options.logs)
    console, outcomes, status = Console(soft_wrap=True, highlight=False, markup=False), [], 0
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("seeds", total=len(seeds), failed=0)
        try:
            for outcome in run_seeds(seeds, processes, options.jobs):
                outcomes.append(outcome)
                for line in [outcome.line(), *([] if outcome.passed else outcome.report(pins))]:
                    console.print(line)
                progress.update(task, advance=1, failed=sum(not one.passed for one in outcomes))
        except KeyboardInterrupt:
            status = INTERRUPTED
    console.print(summary(outcomes))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)) + b"\n")
    return status or int(any(not one.passed for one in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Counts over all seeds, in one line."""
    failed = sorted(one.seed for one in outcomes if not one.passed)
    counts = {
        name: sum(getattr(one, name) for one in outcomes) for name in ("steps", "tokens", "aborts", "preemptions")
    }
    refused = sum(len(one.refused_engines) for one in outcomes)
    words = [
        f"{len(outcomes)} seeds",
        f"{len(failed)} failed",
        *(f"{count:,} {name}" for name, count in counts.items()),
    ]
    words.append(f"{refused} engines refused by name")
    return ", ".join(words) + (f"; failed: {' '.join(map(str, failed))}" if failed else "")


def _pins(texts: Sequence[str]) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--pin {text}: expected NAME=VALUE, the name of a draw and what to take")
        pins[name] = value
    return pins


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seeds", nargs="+", metavar="SEEDS", help="numbers and ranges: 3 7 10..20")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that a seed may take (default: 240)")
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="take this value in place of a draw, such as async_scheduling=false; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to this file, too")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        default=ROOT / ".cache/fuzz/logs",
        help="keep the logs of seeds that fail here (default: .cache/fuzz/logs)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
