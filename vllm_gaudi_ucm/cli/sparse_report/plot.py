"""The picture of `gaudi-ucm sparse-report`: recall by layer, one panel for each ratio; agreement and speed by ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.cli.sparse_report.measurement import Measurement
from vllm_gaudi_ucm.cli.sparse_report.table import SparseReport, case_name, several_summaries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# lines that lie upon each other stay visible
STYLES = ("-", "--", ":", "-.")


def figure_class() -> Any:
    """matplotlib's Figure, used without pyplot; ValueError where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "-o: the picture needs matplotlib: pip install 'vllm-gaudi-ucm[demo]', or leave -o out (--json FILE keeps "
            "every figure)"
        ) from error
    return Figure


def draw(report: SparseReport, path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF by the suffix of `path`)."""
    rows = report.sparse
    ratios = sorted({row.case.ratio for row in rows})
    figure = figure_class()(figsize=(max(10.0, 3.6 * len(ratios)), 7.4), dpi=120, layout="constrained")
    figure.suptitle(report.title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    top, bottom = figure.subfigures(2, 1)
    lines = _lines(rows)
    for axes, ratio in zip(top.subplots(1, len(ratios), sharey=True, squeeze=False)[0], ratios, strict=True):
        _draw_layers(axes, lines, ratio)
    left, middle, right = bottom.subplots(1, 3)
    _draw_by_ratio(left, lines, lambda row: row.mean_recall, "attention-mass recall, mean of layers")
    _draw_by_ratio(middle, lines, lambda row: row.agreement.followed, "equal next tokens, given the dense answer")
    _draw_by_ratio(right, lines, lambda row: row.speedup, "decode speed, dense = 1", percent=False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _lines(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    several = several_summaries(rows)
    lines: dict[str, list[Measurement]] = {}
    for row in rows:
        lines.setdefault(case_name(row.case, several), []).append(row)
    return lines


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "linewidth": 1.6}


def _draw_layers(axes: Axes, lines: dict[str, list[Measurement]], ratio: float) -> None:
    best = None
    for index, (name, rows) in enumerate(lines.items()):
        for row in (row for row in rows if row.case.ratio == ratio):
            axes.plot([100 * share for share in row.recall], label=name, **_style(index))
            best = best or row
    if best is not None:
        axes.plot([100 * share for share in best.best], color="#999999", linewidth=0.9, label="best choice")
        axes.set_title(f"ratio {ratio:g}: {best.attended:.1%} of the tokens attended", loc="left", fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # an axes of `subplots` has one
        axes.set_ylabel("attention-mass recall, %", fontsize=8)
    axes.set_ylim(top=100.5)
    axes.legend(frameon=False, fontsize=7)
    _clean(axes)


def _draw_by_ratio(
    axes: Axes,
    lines: dict[str, list[Measurement]],
    figure: Callable[[Measurement], float],
    title: str,
    percent: bool = True,
) -> None:
    for index, (name, rows) in enumerate(lines.items()):
        scale = 100 if percent else 1
        points = [(100 * row.attended, scale * figure(row)) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=name, **_style(index))
    axes.axhline(100 if percent else 1, color="#999999", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_title(f"{title}, %" if percent else title, loc="left", fontsize=9)
    axes.set_xlabel("tokens attended, % of the context", fontsize=8)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
