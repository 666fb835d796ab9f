"""What `gaudi-ucm op-cost` says, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.cli.op_cost.row import Row
from vllm_gaudi_ucm.cli.output import check_output
from vllm_gaudi_ucm.graphs.cost.specs import device_figures
from vllm_gaudi_ucm.graphs.operator_cost.stream_cost import CHIPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

    rows: list[Row]
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
                    "flops": device_figures(name).flops,
                    "bandwidth": device_figures(name).bandwidth,
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
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        # a file or a pipe has no width that the table would have to fit
        console.width = max(console.width, WIDTH)
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


def _cells(row: Row, device: str) -> list[str]:
    stream = row.cost.by_device[device]
    steps = [] if row.steps is None else [f"{row.steps:,}"]
    times = (f"{1e3 * row.cost.seconds(name):.3f} ({1e3 * row.least_seconds(name):.3f})" for name in CHIPS)
    ratios = f"{row.flops_ratio:.2f}x", f"{row.bytes_ratio(device):.2f}x"
    return [row.name, row.form, row.implementation, *steps, *ratios, f"{stream.operators:,}", *times]


PICTURES = (".png", ".svg", ".pdf")
# by implementation, in their order
COLOURS = {"reference": "#E69F00", "hpu": "#0072B2"}
GOAL = 1.3


def check_path(path: Path) -> None:
    """Before any work is done: ValueError for a name that is no picture's, or without matplotlib."""
    check_output("--plot", path, PICTURES)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot {path}: needs matplotlib: pip install 'vllm-gaudi-ucm[demo]'") from error


def draw(report: OpCostReport, path: Path) -> None:
    """Write the picture, its kind by the suffix."""
    from matplotlib.figure import Figure

    cells: dict[tuple[str, str], list[Row]] = {(row.name, row.form): [] for row in report.rows}
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


def _bars(axes: Axes, cells: list[list[Row]], title: str, ratios: list[list[float]]) -> None:
    height = 0.8 / len(COLOURS)
    for place, name in enumerate(COLOURS):
        at = [index + (place - 0.5) * height for index in range(len(cells))]
        bars = axes.barh(at, [values[place] for values in ratios], height, color=COLOURS[name], label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(GOAL, color="0.4", linewidth=0.8, linestyle="--", label=f"goal, {GOAL}")
    axes.set_xscale("log")
    axes.set_xlim(0.8, 2.5 * max(value for values in ratios for value in values))
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
