"""`gaudi-ucm first-hour`: probes this machine, and writes a report to send.

Exit codes: 0 when it ran to its end, whatever the probes found (findings are in the report); 2 for wrong usage; 130
after Ctrl-C, with a report of what ran. `--json` prints the report's object: `schema`, `device`, `machine`, `verdicts`,
`results` (number, title, mode, case, expected, found, verdict, seconds, data).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER, PROBES
from vllm_gaudi_ucm_tools.first_hour.probe import MODES
from vllm_gaudi_ucm_tools.output import report_console

DEFAULT_OUTPUT = Path("first-hour")
EXIT_INTERRUPTED = 130
LONGEST_FOUND = 200  # of a line while the probes run; the report has all
_STYLES = {"as expected": "green", "answered": "cyan", "does not apply here": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--list", action="store_true", help="list the probes and run none")
    parser.add_argument("--only", metavar="N,N", help="run these probes alone, by number")
    parser.add_argument("--modes", metavar="M,M", help=f"run in these modes alone, of {', '.join(MODES)}")
    parser.add_argument(
        "--sizes", choices=("auto", "small", "full"), default="auto", help="auto: small on a CPU, else full"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model to serve; without it a small random Llama")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="of each process, instead of its probe's own limit"
    )
    parser.add_argument(
        "--serve-minutes", type=float, default=30.0, metavar="MINUTES", help="how long probe 24 serves (30)"
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help=f"folder of the report ({DEFAULT_OUTPUT})"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """See the exit codes above."""
    probes = _probes(args.only)
    modes = _modes(args.modes)
    if args.list:
        _list(probes, args.json)
        return 0
    _check(args)
    from vllm_gaudi_ucm_tools.first_hour.hour import Findings, Hour, Options
    from vllm_gaudi_ucm_tools.first_hour.outputs import report, scrubber, write

    options = Options(probes, modes, args.sizes, args.model, args.time_limit, args.serve_minutes)
    with _signals_interrupt():
        hour = Hour(options)
        try:
            findings: Findings = _run(hour)
            clean = scrubber(options, findings, args.output)
            found = report(findings, options, clean)
            written = write(found, findings.files, clean, args.output)
        finally:
            hour.close()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    _say_written(written, args.output)
    return EXIT_INTERRUPTED if findings.interrupted else 0


def _probes(only: str | None) -> list[Any]:
    if only is None:
        return list(PROBES)
    try:
        numbers = [int(word) for word in only.split(",")]
        return [BY_NUMBER[number] for number in dict.fromkeys(numbers)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"--only {only}: expected numbers of 1 to {len(PROBES)}, such as 4,9; see --list") from error


def _modes(chosen: str | None) -> list[Any]:
    words = list(MODES) if chosen is None else chosen.split(",")
    if unknown := [word for word in words if word not in MODES]:
        raise ValueError(f"--modes {chosen}: found {unknown[0]!r}, expected some of {', '.join(MODES)}")
    return words


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError before the first probe for errors that would appear after the last one."""
    for option, value in (("--time-limit", args.time_limit), ("--serve-minutes", args.serve_minutes)):
        if value is not None and not 0 < value < 1e6:
            raise ValueError(f"{option} {value}: expected a number above 0 and below a million")
    if args.model is not None and not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model}: holds no config.json; expected the folder of a model")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {args.output}: {error.strerror}; expected a folder that can be made") from error


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A closed terminal and SIGTERM end the run as Ctrl-C does: with a report."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(hour: Any) -> Any:
    """Runs the probes with a bar on stderr, which names the current one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(hour.units))

        def begin(unit: Any) -> None:
            progress.update(task, description=f"{unit.name}: {unit.probe.title}"[:70])

        def end(result: Any) -> None:
            name = " ".join(filter(None, (str(result.number), result.mode, result.case)))
            line = Text(f"{name}: ").append(str(result.verdict), _style(str(result.verdict)))
            if str(result.verdict) not in _STYLES:
                line.append(f": {result.found}"[:LONGEST_FOUND])
            progress.console.print(line)
            progress.advance(task)

        return hour.run_steps(begin, end)


def _style(verdict: str) -> str:
    return _STYLES.get(verdict, "bold red")


def _list(probes: list[Any], as_json: bool) -> None:
    if as_json:
        rows = [
            {"number": one.number, "title": one.title, "expected": one.expectation, "modes": list(one.modes)}
            | {"devices": list(one.devices), "questions": list(one.questions)}
            for one in probes
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table("no.", "probe", "expected", "modes", "devices")
    for one in probes:
        table.add_row(str(one.number), one.title, one.expectation, ", ".join(one.modes), ", ".join(one.devices))
    report_console().print(table)


def _show(found: dict[str, Any]) -> None:
    table = Table("no.", "probe", "mode", "found", "verdict", "s")
    for one in found["results"]:
        mode = " ".join(filter(None, (one["mode"], one["case"])))
        verdict = Text(one["verdict"], _style(one["verdict"]))
        table.add_row(str(one["number"]), one["title"], mode, Text(one["found"]), verdict, f"{one['seconds']:.1f}")
    report_console().print(table)


def _say_written(written: dict[str, str], output: Path) -> None:
    """On stderr, because stdout may be the JSON."""
    for name, error in written.items():
        if error:
            print(f"{name}: not written: {error}", file=sys.stderr)
        elif (output / name).exists():
            print(f"written: {output / name}", file=sys.stderr)
