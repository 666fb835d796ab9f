"""`gaudi-ucm op-cost`: compares FLOPs and bytes of attention's operators on Gaudi with the least that a step needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.graphs.cost.specs import device_spec
from vllm_gaudi_ucm_tools.buckets.cost_options import (
    LIMIT_NAMES,
    add_cost_arguments,
    add_limit_arguments,
    add_strategy_arguments,
    read_model,
)
from vllm_gaudi_ucm_tools.buckets.plan import DEFAULT_LIMITS, SERVER, make_plan
from vllm_gaudi_ucm_tools.op_cost.batch import BATCHES
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vllm_gaudi_ucm_tools.op_cost.row import OpCostRow

MOST_BUCKETS = 8
# Limits that the named batches use; the others decide which buckets exist.
BATCH_LIMITS = ("block_size", "max_model_len")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--batch", action="append", choices=BATCHES, help="one of the known workloads; repeatable (default: all)"
    )
    add_strategy_arguments(parser, "the buckets of this strategy, instead of workloads")
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument(
        "--log",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="buckets in use, with the steps of a phase log, or of several of the same limits",
    )
    traffic.add_argument("--mix", choices=MIXES, help="buckets in use, with the steps of a synthetic mix")
    parser.add_argument("--max-graphs", type=int, metavar="N", help=f"of a strategy (default: {SERVER.max_graphs})")
    parser.add_argument(
        "--rows", type=int, metavar="N", help=f"buckets to count, the costliest (default: {MOST_BUCKETS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios (.png, .svg, .pdf)")
    add_cost_arguments(parser)
    add_limit_arguments(parser, "those of `gaudi-ucm plan`; workloads take the block size and the longest request only")


def run(args: argparse.Namespace) -> int:
    """Count and report; unusable input raises a ValueError."""
    if args.device not in CHIPS:
        raise ValueError(f"--device is {args.device!r}: operators are counted for {', '.join(CHIPS)}")
    if args.plot is not None:
        check_path(args.plot)
    of_buckets = any(value is not None for value in (args.strategy, args.buckets, args.log, args.mix))
    report = _of_buckets(args) if of_buckets else _of_batches(args)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report)
    if args.plot is not None:
        draw(report, args.plot)
        if not args.json:
            print(f"written to {args.plot}")
    return 0


def _of_batches(args: argparse.Namespace) -> OpCostReport:
    others = [name for name in LIMIT_NAMES if name not in BATCH_LIMITS]
    others += [
        "max_shared_blocks",
        "max_selected_blocks",
        "contiguous",
        "granularity",
        "strategy_options",
        "max_graphs",
        "rows",
    ]
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: of buckets; give --strategy, --buckets, --log or --mix, too")
    block_size = DEFAULT_LIMITS["block_size"] if args.block_size is None else args.block_size
    if block_size < 1:
        raise ValueError(f"--block-size is {block_size}, expected at least 1")
    # late: it imports vLLM, which takes seconds
    from vllm_gaudi_ucm_tools.op_cost.row import batch_rows

    name, whole = read_model(args.model)
    model = whole.shard(args.tensor_parallel_size, args.pipeline_parallel_size)
    batches = [BATCHES[batch] for batch in dict.fromkeys(args.batch or BATCHES)]
    with task_progress("counting operators") as progress:
        rows = batch_rows(batches, model, block_size, args.max_model_len, progress)
    return OpCostReport(rows, name, args.device, block_size, "known workloads")


def _of_buckets(args: argparse.Namespace) -> OpCostReport:
    if args.batch:
        raise ValueError("--batch: a workload has no buckets; leave --strategy, --buckets, --log and --mix out, or it")
    most = MOST_BUCKETS if args.rows is None else args.rows
    if most < 1:
        raise ValueError(f"--rows is {most}, expected at least 1")
    graphs = SERVER.max_graphs if args.max_graphs is None else args.max_graphs
    of_plan_only = {
        "max_graphs": graphs,
        "skeleton": SERVER.skeleton,
        "step_memory": SERVER.step_memory,
        "quantised_experts": "auto",
        "sparse": None,
        "num_speculative_tokens": 0,
        "kept_states": 0,
        "partial_loads": False,
        "max_loras": 0,
        "picture_tokens": 0,
        "max_lora_rank": 16,
        "count_nodes": False,
        "runner": "auto",
    }
    from vllm_gaudi_ucm_tools.op_cost.row import bucket_rows

    plan = make_plan(argparse.Namespace(**{**vars(args), **of_plan_only}))
    with task_progress("counting operators") as progress:
        rows = bucket_rows(plan.buckets, plan.steps, plan.cost.model, most, progress)
    source = f"buckets of {args.buckets or plan.strategy}" + (f", steps of {plan.traffic}" if plan.traffic else "")
    return OpCostReport(rows, plan.model, args.device, plan.buckets.limits.block_size, source)


ASSUMPTIONS = (
    "Counted from the stream of operators of one attention layer, and modelled on the vendor's peaks: operators run "
    "one after the other, results stay in the card's SRAM while there is room (what was used longest ago goes first), "
    "the card's fused kernels keep their scores there, and the time is that of the slowest engine at its peak. Nothing "
    "was measured."
)

WIDTH = 120


@dataclass(frozen=True)
class OpCostReport:
    """rows: of a model named `model`. device: whose bytes the table shows. source: of the buckets and steps."""

    rows: list[OpCostRow]
    model: str
    device: str
    block_size: int
    source: str

    @property
    def title(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, {self.source}; every figure is modelled"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "modelled": True,
            "assumptions": ASSUMPTIONS,
            "model": self.model,
            "block_size": self.block_size,
            "source": self.source,
            "device": self.device,
            "figures": {
                name: {
                    "flops": device_spec(name).flops,
                    "bandwidth": device_spec(name).bandwidth,
                    "on_chip_bytes": chip.on_chip,
                    "vector_operations": chip.vector,
                }
                for name, chip in CHIPS.items()
            },
            "rows": [row.to_json() for row in self.rows],
        }


def show(report: OpCostReport) -> None:
    """Print the table."""
    from rich import box
    from rich.table import Table

    console = report_console(least_width=WIDTH)
    console.print(report.title, style="bold", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attention of one layer")
    table.add_column("form")
    table.add_column("implementation")
    for heading in ("steps",) if report.rows and report.rows[0].steps is not None else ():
        table.add_column(heading, justify="right")
    for heading in ("FLOPs / least", "bytes / least", "operators"):
        table.add_column(heading, justify="right")
    for device in CHIPS:
        table.add_column(f"{device}, ms (least)", justify="right")
    for row in report.rows:
        table.add_row(*_cells(row, report.device))
    console.print(table)
    console.print(f"Bytes are those of {report.device}. {ASSUMPTIONS}", markup=False)


def _cells(row: OpCostRow, device: str) -> list[str]:
    stream = row.cost.by_device[device]
    steps = [] if row.steps is None else [f"{row.steps:,}"]
    times = (f"{1e3 * row.cost.seconds(name):.3f} ({1e3 * row.least_seconds(name):.3f})" for name in CHIPS)
    ratios = f"{row.flops_ratio:.2f}x", f"{row.bytes_ratio(device):.2f}x"
    return [row.name, row.form, row.implementation, *steps, *ratios, f"{stream.operators:,}", *times]


PICTURES = (".png", ".svg", ".pdf")
# by implementation, in their order
COLOURS = {"reference": "#E69F00", "hpu": "#0072B2"}


def check_path(path: Path) -> None:
    """Before any work is done: ValueError for a name that is no picture's, or without matplotlib."""
    check_output("--plot", path, PICTURES)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot {path}: needs matplotlib: pip install 'vllm-gaudi-ucm[tools]'") from error


def draw(report: OpCostReport, path: Path) -> None:
    """Write the picture, its kind by the suffix."""
    from matplotlib.figure import Figure

    cells: dict[tuple[str, str], list[OpCostRow]] = {(row.name, row.form): [] for row in report.rows}
    for row in report.rows:
        cells[row.name, row.form].append(row)
    figure = Figure(figsize=(12, 1.6 + 0.45 * len(cells)), dpi=130, layout="constrained")
    figure.suptitle(f"Attention of one layer, modelled: {report.title}", fontsize=10, x=0.01, ha="left")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [f"{name}, {form}" for name, form in cells]
    _bars(left, list(cells.values()), "FLOPs / least", [[row.flops_ratio for row in rows] for rows in cells.values()])
    ratios = [[row.bytes_ratio(report.device) for row in rows] for rows in cells.values()]
    _bars(right, list(cells.values()), f"bytes / least, {report.device}", ratios)
    left.set_yticks(range(len(labels)), labels, fontsize=8)
    left.invert_yaxis()
    handles, names = right.get_legend_handles_labels()
    right.legend(handles, names, fontsize=8, frameon=False)
    figure.savefig(path)


def _bars(axes: Axes, cells: list[list[OpCostRow]], title: str, ratios: list[list[float]]) -> None:
    height = 0.8 / len(COLOURS)
    for place, name in enumerate(COLOURS):
        at = [index + (place - 0.5) * height for index in range(len(cells))]
        bars = axes.barh(at, [values[place] for values in ratios], height, color=COLOURS[name], label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_xscale("log")
    axes.set_xlim(0.8, 2.5 * max(value for values in ratios for value in values))
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
