"""The picture of the measured methods: a figure per column, a block size per row, and the recall of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.sparse_methods import ORACLE
from benchmarks.sparse_result import DENSE, HEADINGS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which can be distinguished with any colour vision.
COLOURS = {
    "mean": "#E69F00",
    "minmax": "#009E73",
    "box_mean": "#D55E00",
    "box_mean_fp8": "#F0E442",
    "hash": "#0072B2",
    ORACLE: "#000000",
    "history": "#CC79A7",
    "recency": "#56B4E9",
    "random": "#999999",
}
LAYER_RATIO = 0.1


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Writes the picture to `path` (PNG, SVG or PDF by its suffix)."""
    from matplotlib.figure import Figure

    sizes = sorted({result.block_size for result in results})
    figure = Figure(figsize=(13, 3.4 * len(sizes) + 0.6), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    grid = figure.subplots(len(sizes), 3, squeeze=False)
    for size, row in zip(sizes, grid, strict=True):
        of_size = [result for result in results if result.block_size == size]
        _over_budget(row[0], of_size, "recall")
        _over_layers(row[1], of_size)
        _over_budget(row[2], of_size, "right")
        row[0].set_title(f"blocks of {size} tokens", fontsize=9, loc="left")
    lines, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path)


def _over_budget(axes: Axes, results: Sequence[Result], figure: str) -> None:
    for method, colour in COLOURS.items():
        line = sorted((100 * one.ratio, 100 * getattr(one, figure)) for one in results if one.method == method)
        if line:
            axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=3, linewidth=1.2, label=method)
    for one in results:
        if one.method == DENSE:
            axes.axhline(100 * getattr(one, figure), color="#000000", linestyle=":", linewidth=0.8)
    axes.set_xlabel("budget, % of the blocks", fontsize=8)
    axes.set_ylabel(HEADINGS[figure], fontsize=8)


def _over_layers(axes: Axes, results: Sequence[Result]) -> None:
    ratio = min((one.ratio for one in results), key=lambda found: abs(found - LAYER_RATIO))
    for one in results:
        if one.ratio == ratio and one.method in COLOURS:
            axes.plot([100 * share for share in one.recall_of_layers], color=COLOURS[one.method], linewidth=1.2)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel(f"recall at {ratio:.0%}, %", fontsize=8)
