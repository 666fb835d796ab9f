"""`gaudi-ucm tune`: finds the buckets in which a phase log's steps cost least, and their distance from the optimum."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps
from vllm_gaudi_ucm.graphs.strategies import blind_strategies, build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader, bucket_shapes
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets import other_servers
from vllm_gaudi_ucm_tools.buckets.certificate import GOOD_GAP, MAX_ROUNDS, Certified, certify
from vllm_gaudi_ucm_tools.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    check_block_size,
    check_max_graphs,
    cost_model,
    given_limits,
    limits_of,
    read_model,
)
from vllm_gaudi_ucm_tools.buckets.padding import Padding, measure_padding
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress, written_whole
from vllm_gaudi_ucm_tools.phases.phases import open_logs
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.tune import DEFAULT_MARGIN, tune


@dataclass(frozen=True)
class TuneReport:
    """Buckets tuned to `steps` and a share `margin` of larger ones; `later` are steps of the log that were held out."""

    certified: Certified
    steps: Steps
    max_graphs: int
    margin: float
    later: Steps | None

    @property
    def buckets(self) -> BucketSet:
        return self.certified.buckets

    @cached_property
    def padding(self) -> Padding:
        return measure_padding(self.buckets, self.steps)

    @cached_property
    def later_padding(self) -> Padding | None:
        if self.later is None:
            return None
        check_steps(self.later, self.buckets.limits)
        return measure_padding(self.buckets, self.later)

    @property
    def fitted_ratio(self) -> float:
        """Returns the padded over the true cost on the tuning objective: with a margin, it includes larger steps."""
        return self.certified.seconds / self.certified.true_seconds

    @property
    def bound_ratio(self) -> float:
        """Returns a lower bound of the cost ratio of any set of as many graphs, on the tuning objective."""
        return self.certified.bound / self.certified.true_seconds

    @cached_property
    def others(self) -> dict[str, Padding]:
        """Returns the padding of the blind strategies, each with the same `max_graphs`."""
        limits, cost = self.buckets.limits, self.buckets.cost
        request = BucketRequest(limits, cost, self.max_graphs)
        return {name: measure_padding(build_buckets(name, request), self.steps) for name in blind_strategies()}

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain values."""
        later = self.later_padding
        return {
            "steps": self.steps.count,
            "distinct_shapes": len(self.steps.forward),
            "graphs": self.buckets.num_graphs,
            "forward_graphs": len(self.buckets.forward),
            "logits_graphs": len(self.buckets.logits),
            "padding": self.padding.to_json(),
            "margin": self.margin,
            "fitted_ratio": round(self.fitted_ratio, 5),
            "bound_ratio": round(self.bound_ratio, 5),
            "gap_at_most": round(self.certified.gap, 5),
            "held_out": later and {"steps": later.used.sum().item(), **later.to_json()},
            "other_strategies": {
                name: {"graphs": padding.buckets.num_graphs, **padding.to_json()}
                for name, padding in self.others.items()
            },
            "forward": [shape.to_list() for shape in self.buckets.forward],
            "logits": list(self.buckets.logits),
        }


def show(report: TuneReport, output: Path | None) -> None:
    """Prints the comparison, the gap, and the path of the bucket file."""
    from rich import box
    from rich.table import Table

    console = report_console()
    shapes = len(report.steps.forward)
    console.print(
        f"{counted(report.steps.count, 'step')} of {counted(shapes, 'shape')}; "
        "padded over true cost (modelled) and sizes"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for heading in ("graphs", "cost", *report.padding.axes):
        table.add_column(heading, justify="right")
    table.add_row(*_cells("tuned", report.padding), style="bold")
    if report.later_padding is not None:
        table.add_row(*_cells("tuned, held-out steps", report.later_padding))
    for name, padding in report.others.items():
        table.add_row(*_cells(name, padding))
    console.print(table)
    fitted = f"these steps, {report.margin:.0%} of their weight on larger ones" if report.margin else "these steps"
    console.print(
        f"What was tuned to ({fitted}) costs {report.fitted_ratio:.3f}x in these graphs; "
        f"no {report.max_graphs} graphs can cost it less than {report.bound_ratio:.3f}x: "
        f"the tuned ones are at most {report.certified.gap:.1%} above the optimum."
    )
    if output is not None:
        console.print(f"buckets written to {output}", markup=False)


def _cells(name: str, padding: Padding) -> list[str]:
    ratios = [f"{value:.2f}x" for value in padding.axes.values()]
    return [name, str(padding.buckets.num_graphs), f"{padding.ratio:.3f}x", *ratios]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument(
        "log", type=Path, nargs="+", help="a phase log, of a server or of gaudi-ucm trace; several of the same limits"
    )
    parser.add_argument(
        "--max-graphs", type=int, default=64, metavar="N", help="graphs, forward and logits together (default: 64)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="bucket file to write (YAML)")
    parser.add_argument(
        "--margin",
        type=float,
        default=DEFAULT_MARGIN,
        metavar="SHARE",
        help="weight that goes to steps somewhat larger than those of the log (default: %(default)s); 0 fits the log "
        "exactly, and makes larger steps run in the configured maximum, often at a hundred times their cost",
    )
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="tune without the last part of the log and say what the buckets cost there (default: %(default)s)",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=GOOD_GAP,
        metavar="SHARE",
        help="go on until the buckets are proven to cost at most this share more than the best possible ones, or for "
        f"{MAX_ROUNDS} rounds (default: %(default)s); 0 makes all rounds, 1 none",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_cost_arguments(parser)
    add_limit_arguments(parser, "the first line of the log")
    other_servers.add_arguments(parser, "tune")


def run(args: argparse.Namespace) -> int:
    """Tunes, writes the bucket file, and reports; unusable input raises a ValueError."""
    if (done := other_servers.run(args, "tune")) is not None:
        return done
    for option in ("margin", "holdout"):
        value = getattr(args, option)
        if not 0.0 <= value <= 0.9:
            raise ValueError(f"--{option} is {value}, expected a share from 0 to 0.9")
    if not 0.0 <= args.gap <= 1.0:
        raise ValueError(f"--gap is {args.gap}, expected a share from 0 to 1")
    check_max_graphs(args.max_graphs)
    check_output("--output", args.output)
    with open_logs(args.log, given_limits(args)) as logs:
        check_block_size(args, logs.header, logs.header_place)
        limits = limits_of(args, logs.header, logs.header_place)
        cost = cost_model(args, limits.block_size)
        steps, later = read_steps(logs.logs, args.holdout)
    if not steps.count:
        raise ValueError(f"{logs.name}: holds no steps to tune to")
    report = make_report(args, steps, later, cost, limits)
    if args.output is not None:
        with written_whole(args.output) as path:
            write_bucket_file(path, report.buckets, _made_for(args, report))
    if args.json:
        files = {"log": logs.name, "output": args.output and str(args.output)}
        print(json.dumps({**files, **report.to_json()}, indent=2))
    else:
        show(report, args.output)
    return 0


def read_steps(logs: Sequence[PhaseLogReader], holdout: float) -> tuple[Steps, Steps]:
    """Returns (steps to tune to, held-out steps) of logs, counted by shape. The last share of each log is held out."""
    rest: list[Iterator[StepRecord]] = []

    def first() -> Iterator[StepRecord]:
        for log in logs:
            count = log.count() if holdout else 0
            rest.append(log.steps())
            yield from islice(rest[-1], count - int(count * holdout) if holdout else None)

    tuned = Steps.from_buckets(bucket_shapes(first()))
    return tuned, Steps.from_buckets(bucket_shapes(chain.from_iterable(rest)))


def make_report(args: argparse.Namespace, steps: Steps, later: Steps, cost: Any, limits: Any) -> TuneReport:
    """Tunes on `steps`; `later` are the held-out ones."""
    if not limits.bounds_prompt_tiles:
        steps, later = steps.without_prompt_tiles(), later.without_prompt_tiles()
    with task_progress("tuning") as progress:
        buckets = tune(steps, limits, cost, args.max_graphs, args.margin, progress)
    objective = Objective.of(steps, limits, cost, args.margin)
    with task_progress("proving") as progress:
        certified = certify(objective, buckets, args.max_graphs, args.gap, progress)
    return TuneReport(certified, steps, args.max_graphs, args.margin, later if later.count else None)


def _made_for(args: argparse.Namespace, report: TuneReport) -> dict[str, Any]:
    name, _ = read_model(args.model)
    return {
        "log": ", ".join(path.name for path in args.log),
        "steps": report.steps.count,
        "model": name,
        "device": args.device,
        "margin": args.margin,
        "modelled_cost_ratio": round(report.padding.ratio, 4),
        "gap_at_most": round(report.certified.gap, 4),
    }
