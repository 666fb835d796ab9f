"""A picture of a traffic and the buckets around it: the server's own strategy's, and the chosen ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm_tools.vllm_gaudi.report import Comparison, SetReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".png", ".svg", ".pdf")
COLOURS = ("#aaaaaa", "black")
# Of each phase: sizes of a shape that are drawn, their names, and the colour of steps.
PHASES = (
    ("prompt", (1, 2), ("query tokens", "context blocks"), "#2a6f97"),
    ("decode", (0, 2), ("requests (rows)", "blocks"), "#b5651d"),
)


def draw(comparison: Comparison, path: Path) -> None:
    """Writes the picture. Raises ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"--picture {path}: needs matplotlib: pip install 'vllm-gaudi-ucm[tools]', or leave the option out"
        ) from error
    figure = Figure(figsize=(12, 8.5), dpi=130, layout="constrained")
    figure.suptitle(f"Buckets of vllm-gaudi: {comparison.traffic}", fontsize=12, x=0.01, ha="left")
    places, bars = figure.subplots(2, 2, height_ratios=(1.6, 1))
    last = comparison.sets[-1]
    for axes, (phase, sizes, names, colour) in zip(places, PHASES, strict=True):
        _draw_phase(axes, comparison, phase, sizes, colour)
        axes.set(xlabel=names[0], ylabel=names[1])
        axes.set_title(f"{phase}s: runs, and buckets of {comparison.sets[0].name} and {last.name}", loc="left")
    _draw_bars(bars[0], comparison, "graphs", [found.prepared.num_graphs for found in comparison.sets], "{:,.0f}")
    lost = [100 * (found.ratio - 1) for found in comparison.sets]
    _draw_bars(bars[1], comparison, "time lost to padding, % (modelled)", lost, "{:.1f} %")
    figure.savefig(path)


def _draw_phase(axes: Axes, comparison: Comparison, phase: str, sizes: tuple[int, int], colour: str) -> None:
    runs: Counter[tuple[int, int]] = Counter()
    for ran, count in comparison.sets[-1].outcome.ran.items() if comparison.sets[-1].outcome else ():
        if ran.wanted.phase == phase and ran.wanted.rows:
            runs[ran.wanted.shape[sizes[0]], ran.wanted.shape[sizes[1]]] += count
    for found, mark in zip((comparison.sets[0], comparison.sets[-1]), COLOURS, strict=True):
        shapes = np.array(_shapes(found, phase))
        axes.scatter(
            shapes[:, sizes[0]],
            shapes[:, sizes[1]],
            s=30,
            marker="s",
            facecolors="none",
            edgecolors=mark,
            label=f"{found.name}, {len(shapes)} buckets",
        )
    if runs:
        points = np.array(list(runs))
        weights = np.sqrt(np.array(list(runs.values()), np.float64))
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=4 + 40 * weights / weights.max(),
            alpha=0.35,
            linewidths=0,
            color=colour,
            label="runs, by their number",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", base=2, linthresh=1)
    axes.set_xlim(left=0.8)
    axes.set_ylim(-0.5, 2 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _shapes(found: SetReport, phase: str) -> tuple[tuple[int, int, int], ...]:
    return found.prepared.prompts if phase == "prompt" else found.prepared.decodes


def _draw_bars(axes: Axes, comparison: Comparison, title: str, values: list[float], form: str) -> None:
    names = [found.name for found in comparison.sets]
    drawn = axes.barh(names, values, color=[COLOURS[found.name == comparison.chosen] for found in comparison.sets])
    axes.bar_label(drawn, [f" {form.format(value)}" for value in values], fontsize=8)
    axes.set_xlim(min(0.0, *values), max(1e-9, *values) * 1.25)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
