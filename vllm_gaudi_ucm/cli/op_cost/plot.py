"""The picture of `gaudi-ucm op-cost`: FLOPs and bytes over the least, by batch or bucket."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.cli.output_file import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vllm_gaudi_ucm.cli.op_cost.report import OpCostReport
    from vllm_gaudi_ucm.cli.op_cost.row import Row

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
