"""Plots of a report, as SVG inside its page. Without matplotlib there are none, and the page tells it."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_TITLE, LONGEST_LABEL = 80, 40


def why_no_plots() -> str:
    """Returns why plots cannot be drawn; "" if they can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "No plots: matplotlib is not installed (pip install 'vllm-gaudi-ucm[tools]'). The JSON has all points."


def plot(title: str, series: Sequence[Mapping[str, Any]]) -> str:
    """An `<svg>` of a probe's series over one pair of axes. series: name, x, y (names of the axes), points."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "first-hour"}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for one in series:
            points = sorted(map(tuple, one["points"]))
            if points:
                axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=one["name"][:LONGEST_LABEL])
        xs = [point[0] for one in series for point in one["points"]]
        if xs and min(xs) > 0 and max(xs) > 20 * min(xs):
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(series[0]["x"][:LONGEST_LABEL])
        axes.set_ylabel(series[0]["y"][:LONGEST_LABEL])
        axes.set_title(title[:LONGEST_TITLE], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if xs:
            axes.legend(fontsize=8, frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
