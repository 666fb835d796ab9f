"""`gaudi-ucm plot`: the steps of a phase log and the buckets over them, as a picture or a self-contained page."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_gaudi_ucm.cli.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    check_block_size,
    cost_model,
    limits_of,
)
from vllm_gaudi_ucm.cli.output_file import check_output
from vllm_gaudi_ucm.graphs.shapes.padding import Padding, measure_padding
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies import build_buckets
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest
from vllm_gaudi_ucm.graphs.tuning.tune import check_steps
from vllm_gaudi_ucm.observability.phase_log import StepRecord, bucket_shapes, read_phase_log
from vllm_gaudi_ucm.options.counted import counted

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("log", type=Path, help="a phase log, of a server or of gaudi-ucm trace")
    parser.add_argument("--buckets", type=Path, metavar="FILE", help="draw the buckets of this file over the steps")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="picture (.png, .svg, .pdf) or page (.html)"
    )
    add_cost_arguments(parser)
    add_limit_arguments(parser, "the first line of the log; they are needed with --buckets only")


def run(args: argparse.Namespace) -> int:
    """Write the picture or the page; unusable input raises a ValueError."""
    check_output("--output", args.output, (*PICTURES, *PAGES))
    suffix = args.output.suffix.lower()
    header, records = read_phase_log(args.log)
    if not records:
        raise ValueError(f"{args.log}: holds no steps to draw")
    name = header.get("mix") or Path(str(header.get("model", ""))).name or args.log.name
    title = f"{name}: {counted(len(records), 'step')}"
    padding = None if args.buckets is None else bucket_padding(args, header, records)
    if suffix in PAGES:
        from vllm_gaudi_ucm.cli.buckets.plot_page import page

        args.output.write_text(page(records, padding, title), encoding="utf-8")
    else:
        from vllm_gaudi_ucm.cli.buckets.plot_picture import draw

        draw(records, padding, title, args.output)
    print(f"written to {args.output}")
    return 0


def bucket_padding(args: argparse.Namespace, header: dict[str, object], records: list[StepRecord]) -> Padding:
    """The padding of the log's steps in the buckets of --buckets."""
    where = f"the first line of {args.log}"
    check_block_size(args, header, where)
    limits = limits_of(args, header, where)
    cost = cost_model(args, limits.block_size)
    buckets = build_buckets("file", BucketRequest(limits, cost, path=args.buckets))
    steps = Steps.of(bucket_shapes(records))
    check_steps(steps, limits)
    return measure_padding(buckets, steps)
