"""The picture of a phase log: phases over time, steps and time by phase, attention work by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.options.errors import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 60
# Okabe and Ito's colours, which can be distinguished with any colour vision.
PHASE_COLOURS = {
    "c--": "#E69F00",
    "cs-": "#F0E442",
    "c-u": "#D55E00",
    "csu": "#CC79A7",
    "-s-": "#009E73",
    "-su": "#56B4E9",
    "--u": "#0072B2",
    "---": "#999999",
}
PART_COLOURS = {"causal": "#E69F00", "shared": "#009E73", "unique": "#0072B2", "selected": "#CC79A7"}


class PlotUnavailable(RuntimeError):
    """matplotlib is not installed; the message names the extra that brings it."""


def plot_phases(records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Write the picture of `records` to `path` (PNG, SVG or PDF by its suffix)."""
    figure_class = _figure_class()
    summary = PhaseSummary(records)
    figure = figure_class(figsize=(11, 6.4), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    _draw_timeline(top.subplots(), records)
    left, right = bottom.subplots(1, 2, width_ratios=(1.5, 1))
    _draw_by_phase(left, summary)
    _draw_by_part(right, summary)
    figure.savefig(path)


def _figure_class() -> Any:
    """matplotlib's Figure, used without pyplot: no display, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(
            "--plot needs matplotlib, which is not installed: pip install 'vllm-gaudi-ucm[tools]'"
        ) from error
    return Figure


def _draw_timeline(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Stacked columns: the share of each phase in equal slices of step time, weighted by milliseconds."""
    times = np.array([r.plan_ms + r.forward_ms + r.sample_ms for r in records]) / 1e3
    ends = np.cumsum(times)
    columns = max(1, min(MAX_COLUMNS, len(records)))
    edges = np.linspace(0.0, ends[-1] if len(ends) and ends[-1] > 0 else 1.0, columns + 1)
    bottom = np.zeros(columns)
    for phase, totals in PhaseSummary(records).ranked():
        mine = np.array([r.bucket.phase == phase for r in records])
        heights = _overlap(ends[mine] - times[mine], ends[mine], edges) / (edges[1] - edges[0])
        label = f"{phase}  {counted(totals.steps, 'step')}"
        width = (edges[1] - edges[0]) * 0.94
        axes.bar(edges[:-1], heights, width, bottom=bottom, align="edge", color=PHASE_COLOURS[phase], label=label)
        bottom += heights
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1), xlabel="step time so far, s", ylabel="share of time")
    axes.set_title("phases over time", loc="left", fontsize=10)
    axes.yaxis.set_major_formatter(_percent)
    if records:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, prop={"family": "monospace", "size": 9}
        )
    _clean(axes)


def _overlap(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Seconds of the intervals [starts, ends) that fall into each column."""
    if not len(starts):
        return np.zeros(len(edges) - 1)
    low = np.maximum(starts[:, None], edges[None, :-1])
    high = np.minimum(ends[:, None], edges[None, 1:])
    return np.clip(high - low, 0.0, None).sum(axis=0)


def _draw_by_phase(axes: Axes, summary: PhaseSummary) -> None:
    """Share of steps and of time, side by side, for each phase."""
    total = summary.total()
    ranked = summary.ranked()[::-1]
    rows = np.arange(len(ranked))
    steps = [totals.steps / (total.steps or 1) for _, totals in ranked]
    times = [totals.ms / (total.ms or 1.0) for _, totals in ranked]
    colours = [PHASE_COLOURS[phase] for phase, _ in ranked]
    axes.barh(rows + 0.2, steps, 0.36, color=colours, alpha=0.45, label="steps")
    bars = axes.barh(rows - 0.2, times, 0.36, color=colours, label="time")
    means = [f" {totals.mean_ms:.1f} ms per step" for _, totals in ranked]
    axes.bar_label(bars, means, fontsize=8)
    axes.set_yticks(rows, [phase for phase, _ in ranked], family="monospace")
    axes.set_xlim(0, max([*steps, *times], default=1.0) * 1.25)
    axes.xaxis.set_major_formatter(_percent)
    axes.set_title("by phase: share of steps (light) and of time (full)", loc="left", fontsize=10)
    _clean(axes)


def _draw_by_part(axes: Axes, summary: PhaseSummary) -> None:
    """Attention work of the parts."""
    shares = summary.total().attention_shares()
    colours = [PART_COLOURS[part] for part in shares]
    bars = axes.barh(list(shares)[::-1], list(shares.values())[::-1], 0.55, color=colours[::-1])
    axes.bar_label(bars, [f" {share:.1%}" for share in list(shares.values())[::-1]], fontsize=9)
    axes.set_xlim(0, max(*shares.values(), 0.01) * 1.25)
    axes.xaxis.set_major_formatter(_percent)
    axes.set_title("attention work by part", loc="left", fontsize=10)
    _clean(axes)


def _percent(value: float, _: float) -> str:
    return f"{value:.0%}" if value <= 1 else ""


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
