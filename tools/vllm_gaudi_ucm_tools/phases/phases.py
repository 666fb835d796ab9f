"""`gaudi-ucm phases LOG ...`: what phases a server ran, how long they took, and which part did the attention work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.observability.phase_log import PhaseLogError
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.output import check_output, report_console
from vllm_gaudi_ucm_tools.phases.joined_logs import JoinedLogs
from vllm_gaudi_ucm_tools.phases.summary_json import summary_json

LONG_BYTES = 32 << 20  # about 100,000 steps, read in two seconds


@contextmanager
def open_logs(paths: Sequence[Path], given: Collection[str] = ()) -> Iterator[JoinedLogs]:
    """The logs while the block runs. given: limits that options say. Raises PhaseLogError, see `JoinedLogs`."""
    if sum(path.stat().st_size for path in paths if path.is_file()) < LONG_BYTES:
        with JoinedLogs(paths, given=given) as logs:
            yield logs
        return
    # imported here: short logs are read before rich could be loaded
    from vllm_gaudi_ucm_tools.output import task_progress

    with task_progress("reading") as progress, JoinedLogs(paths, progress, given) as logs:
        yield logs


PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "log",
        type=Path,
        nargs="+",
        help='a phase log, written with --additional-config \'{"ucm": {"phase_log": ...}}\'; or several of the same '
        "limits, which are summed up",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write a picture (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 when the log or the picture's path is unusable."""
    try:
        check_output("--plot", args.plot, PICTURES)
        with open_logs(args.log) as logs:
            header = logs.header
            # a picture needs all steps at once
            records = list(logs.steps()) if args.plot is not None else None
            summary = PhaseSummary(logs.steps() if records is None else records)
        if records is not None:
            write_plot(records, args.plot, header)
    except (PhaseLogError, RuntimeError, ValueError, OSError) as error:
        print(f"gaudi-ucm phases: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"header": header, **summary_json(summary)}, indent=2))
    else:
        show(summary, header, args.plot)
    return 0


def write_plot(records: list[StepRecord], path: Path, header: dict[str, Any]) -> None:
    """Write the picture of a log; an unknown suffix or a missing folder raises."""
    from vllm_gaudi_ucm_tools.phases.phase_plot import plot_phases

    model = Path(str(header.get("model", ""))).name
    plot_phases(records, path, title=f"{model or 'phase log'}: {counted(len(records), 'step')}")


def show(summary: PhaseSummary, header: dict[str, Any], plot: Path | None = None) -> None:
    """Print the histogram, the table and the attention shares."""

    from vllm_gaudi_ucm.observability.phase_summary import attention_sentence, summary_table
    from vllm_gaudi_ucm_tools.phases.phase_bars import phase_bars

    console = report_console()
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if name != "schema" and value is not None)
    if facts:
        console.print(facts, style="dim", markup=False)
    if not summary.steps:
        console.print("The log holds no steps yet.")
        return
    console.print()
    console.print(phase_bars(summary))
    console.print(summary_table(summary))
    console.print(attention_sentence(summary))
    if plot is not None:
        console.print(f"picture written to {plot}", markup=False)
