"""`gaudi-ucm tune`: the buckets that cost the steps of a phase log the least, and how far from the optimum they are."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.cli.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    check_block_size,
    check_max_graphs,
    cost_model,
    limits_of,
    read_model,
)
from vllm_gaudi_ucm.cli.buckets.log_reading import open_log
from vllm_gaudi_ucm.cli.buckets.tune_report import TuneReport, show
from vllm_gaudi_ucm.cli.output_file import check_output, written_whole
from vllm_gaudi_ucm.cli.task_progress import task_progress
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file
from vllm_gaudi_ucm.graphs.tuning.certify import GOOD_GAP, MAX_ROUNDS, certify
from vllm_gaudi_ucm.graphs.tuning.objective import Objective
from vllm_gaudi_ucm.graphs.tuning.tune import DEFAULT_MARGIN, tune
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader, bucket_shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("log", type=Path, help="a phase log, of a server or of gaudi-ucm trace")
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


def run(args: argparse.Namespace) -> int:
    """Tune, write the bucket file, and report; unusable input raises a ValueError."""
    for option in ("margin", "holdout"):
        value = getattr(args, option)
        if not 0.0 <= value <= 0.9:
            raise ValueError(f"--{option} is {value}, expected a share from 0 to 0.9")
    if not 0.0 <= args.gap <= 1.0:
        raise ValueError(f"--gap is {args.gap}, expected a share from 0 to 1")
    check_max_graphs(args.max_graphs)
    check_output("--output", args.output)
    with open_log(args.log) as log:
        where = f"the first line of {args.log}"
        check_block_size(args, log.header, where)
        limits = limits_of(args, log.header, where)
        cost = cost_model(args, limits.block_size)
        steps, later = read_steps(log, args.holdout)
    if not steps.count:
        raise ValueError(f"{args.log}: holds no steps to tune to")
    report = make_report(args, steps, later, cost, limits)
    if args.output is not None:
        with written_whole(args.output) as path:
            write_bucket_file(path, report.buckets, _made_for(args, report))
    if args.json:
        print(
            json.dumps({"log": str(args.log), "output": args.output and str(args.output), **report.to_json()}, indent=2)
        )
    else:
        show(report, args.output)
    return 0


def read_steps(log: PhaseLogReader, holdout: float) -> tuple[Steps, Steps]:
    """The steps of a log, counted by shape, and those of the share of it that is held out."""
    count = log.count() if holdout else 0
    seen = count - int(count * holdout) if holdout else None
    records = log.steps()
    return Steps.of(bucket_shapes(islice(records, seen))), Steps.of(bucket_shapes(records))


def make_report(args: argparse.Namespace, steps: Steps, later: Steps, cost: Any, limits: Any) -> TuneReport:
    """Tunes on steps; later: those that were held out."""
    if not limits.causal_reach:
        steps, later = steps.without_reach(), later.without_reach()
    with task_progress("tuning") as progress:
        buckets = tune(steps, limits, cost, args.max_graphs, args.margin, progress)
    objective = Objective.of(steps, limits, cost, args.margin)
    with task_progress("proving") as progress:
        certified = certify(objective, buckets, args.max_graphs, args.gap, progress)
    return TuneReport(certified, steps, args.max_graphs, args.margin, later if later.count else None)


def _made_for(args: argparse.Namespace, report: TuneReport) -> dict[str, Any]:
    name, _ = read_model(args.model)
    return {
        "log": args.log.name,
        "steps": report.steps.count,
        "model": name,
        "device": args.device,
        "margin": args.margin,
        "modelled_cost_ratio": round(report.padding.ratio, 4),
        "gap_at_most": round(report.certified.gap, 4),
    }
