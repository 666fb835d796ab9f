"""`gaudi-ucm trace`: a phase log of synthetic traffic, from a named mix and a seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from vllm_gaudi_ucm.observability.log_file import keep_previous
from vllm_gaudi_ucm.observability.phase_log import PhaseLog, PhaseLogError
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    cost_model,
    limits_of,
    read_model,
)
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress, written_whole
from vllm_gaudi_ucm_tools.phases.summary_json import summary_json
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Mix, Simulation

REPORT_EVERY = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    kinds = "; ".join(f"{name}: {mix.description}" for name, mix in MIXES.items())
    parser.add_argument("--mix", choices=MIXES, required=True, help=kinds)
    parser.add_argument("--steps", type=int, default=10_000, metavar="N", help="steps to simulate (default: 10000)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed gives the same log (default: 0)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the phase log to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_cost_arguments(parser)
    add_limit_arguments(parser, "those of the mix")


def run(args: argparse.Namespace) -> int:
    """Simulate and write the log; a bad option raises a ValueError."""
    if args.steps < 1:
        raise ValueError(f"--steps is {args.steps}, expected at least 1")
    check_output("--output", args.output)
    summary, header = write_trace(args)
    if args.json:
        print(json.dumps({"header": header, "log": str(args.output), **summary_json(summary)}, indent=2))
        return 0

    from vllm_gaudi_ucm.observability.phase_summary import summary_table
    from vllm_gaudi_ucm_tools.phases.phase_bars import phase_bars

    console = report_console()
    console.print(
        f"{args.output}: {counted(args.steps, 'step')} of the mix {args.mix}, times modelled",
        markup=False,
        soft_wrap=True,
    )
    console.print(phase_bars(summary))
    console.print(summary_table(summary))
    return 0


def _open(path: Path, header: dict[str, object], output: Path) -> PhaseLog:
    try:
        return PhaseLog(path, header, emit=lambda text: None)
    except PhaseLogError as error:
        raise ValueError(f"--output {output}: could not be written: {error.__cause__}") from error


def mix_within(args: argparse.Namespace, name: str) -> Mix:
    """Returns a mix with the limits that the options give. Raises ValueError if there is none of that name."""
    if name not in MIXES:
        raise ValueError(f"--mix is {name!r}, expected one of {', '.join(MIXES)}")
    mix = MIXES[name]
    if args.granularity == "token":
        raise ValueError("--granularity is 'token', expected 'block' with --mix: its traffic is simulated in blocks")
    return replace(mix, limits=limits_of(args, vars(mix.limits), f"the mix {name}"))


def write_trace(args: argparse.Namespace) -> tuple[PhaseSummary, dict[str, object]]:
    """Writes the log and returns its totals and its header."""
    mix = mix_within(args, args.mix)
    name, _ = read_model(args.model)
    header = {"model": name, "device": args.device, "mix": args.mix, "seed": args.seed, "modelled": True}
    header |= asdict(mix.limits)
    del header["bounds_prompt_tiles"]  # of the device that buckets are for, not of the traffic
    simulation = Simulation(mix, cost_model(args, mix.limits.block_size), args.seed)
    with written_whole(args.output) as path:
        log = _open(path, header, args.output)
        try:
            with task_progress(f"simulating {args.mix}") as report:
                for record in simulation.steps(args.steps):
                    log.append(record)
                    if not log.is_open:
                        raise ValueError(f"--output {args.output}: could not be written; see whether the disk is full")
                    if record.step % REPORT_EVERY == 0:
                        report(record.step / args.steps)
                report(1.0)
        finally:
            log.close()
        keep_previous(args.output)
    return log.summary, header
