"""Figures of `benchmarks.agent_first_token`: of each side and load, as a table and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from vllm_gaudi_ucm_tools.output import report_console


class Run(NamedTuple):
    """The requests of a side in one round, at one load: milliseconds to the first token (`ms`), and the cached share of
    the prompt (`cached`).
    """

    round: int
    side: str
    load: str
    requests: list[dict[str, float]]


class Figures(NamedTuple):
    """Figures of a side at one load; each has a number for every round.

    median, mean, p90: milliseconds to the first token. cached: share of prompt tokens that were not computed. ratio:
    the mean, divided by the mean of the first side in the same round.
    """

    median: list[float]
    mean: list[float]
    p90: list[float]
    cached: list[float]
    ratio: list[float]


def figures_of(runs: Sequence[Run]) -> dict[str, dict[str, Figures]]:
    """Returns the figures by load and side; rounds that lack the first side are left out."""
    found: dict[str, dict[str, Figures]] = {}
    means = {(run.load, run.side, run.round): statistics.mean(one["ms"] for one in run.requests) for run in runs}
    first = runs[0].side if runs else ""
    for run in sorted(runs, key=lambda run: run.round):
        base = means.get((run.load, first, run.round))
        if base is None:
            continue
        figures = found.setdefault(run.load, {}).setdefault(run.side, Figures([], [], [], [], []))
        times = sorted(one["ms"] for one in run.requests)
        figures.median.append(statistics.median(times))
        figures.mean.append(statistics.mean(times))
        figures.p90.append(times[min(len(times) - 1, int(0.9 * len(times)))])
        figures.cached.append(statistics.mean(one["cached"] for one in run.requests))
        figures.ratio.append(figures.mean[-1] / base)
    return found


def print_table(found: dict[str, dict[str, Figures]]) -> None:
    table = Table(title="time to the first token: median of the rounds (least to most)")
    for column in (
        "load",
        "side",
        "rounds",
        "median, ms",
        "mean, ms",
        "p90, ms",
        "cached",
        "mean, of the first side's",
    ):
        table.add_column(column, justify="left" if column in ("load", "side") else "right")
    for load, sides in found.items():
        for side, figures in sides.items():
            times = [f"{statistics.median(one):.0f}" for one in (figures.median, figures.mean, figures.p90)]
            cached, ratio = statistics.median(figures.cached), statistics.median(figures.ratio)
            spread = f"{ratio:.2f} ({min(figures.ratio):.2f} to {max(figures.ratio):.2f})"
            table.add_row(load, side, str(len(figures.ratio)), *times, f"{cached:.0%}", spread)
        table.add_section()
    report_console(least_width=120).print(table)


def draw(found: dict[str, dict[str, Figures]], path: Path) -> None:
    """Draws the ratios to the first side: a bar for the median, a dot for each round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 3.6), dpi=130, layout="constrained")
    places = figure.subplots(1, len(found), sharex=True, squeeze=False)[0]
    for axes, (load, sides) in zip(places, found.items(), strict=True):
        names = list(sides)[::-1]
        medians = [statistics.median(sides[name].ratio) for name in names]
        axes.barh(names, medians, color="#56B4E9")
        for number, name in enumerate(names):
            axes.plot(sides[name].ratio, [number] * len(sides[name].ratio), "k.", markersize=4)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{load} load", loc="left", fontsize=10)
        axes.set_xlabel(f"mean time to the first token, of {names[-1]}'s")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
