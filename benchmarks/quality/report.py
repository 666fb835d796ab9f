"""Tables, goals and a picture of the records, with confidence intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.measure import DENSE, Record
from benchmarks.quality.methods import DEFAULT, EXACT, QUESTS, WITH_A_GOAL, compared

RESAMPLES, LEVEL = 2000, 95.0
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#000000", "#56B4E9", "#999999", "#8B6F00", "#444444"]
MARKERS = "os^Dv"
GOAL_RATIO, BEHIND_EXACT, SOLVED, FEW = 0.1, 0.01, 0.5, 5


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.0f} [{100 * self.low:.0f}, {100 * self.high:.0f}]"


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Returns the mean and its 95 % interval, by the percentiles of resampled means. values: one per sample."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(array), (RESAMPLES, len(array)))
    means = array[drawn].mean(1)
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Interval(float(array.mean()), float(low), float(high))


Cells = dict[tuple[str, float], dict[tuple[object, ...], Record]]
"""By method and ratio, the records by sample."""


def cells(records: Sequence[Record]) -> Cells:
    found: Cells = defaultdict(dict)
    for record in records:
        key = record.key
        found[record.method, record.ratio][key.task, key.length, key.seed, key.number] = record
    return found


def groups(records: Sequence[Record]) -> dict[tuple[str, int, int], list[Record]]:
    """Returns the records of each model, length and block size."""
    found: dict[tuple[str, int, int], list[Record]] = defaultdict(list)
    for record in records:
        found[record.key.model, record.key.length, record.key.block_size].append(record)
    return dict(sorted(found.items()))


def table(records: Sequence[Record], figure: Callable[[Record], float]) -> str:
    """Returns a Markdown table: methods over ratios, each cell over all samples, tasks weighing as their samples."""
    found = cells(records)
    ratios = sorted({ratio for method, ratio in found if method != DENSE})
    lines = [
        f"| method | {' | '.join(f'{ratio:.0%}' for ratio in ratios)} |",
        f"|---|{'---|' * len(ratios)}",
    ]
    for method in dict.fromkeys(record.method for record in records):
        row = [found.get((method, ratio)) or found.get((method, 1.0)) or {} for ratio in ratios]
        shown = [str(bootstrap([figure(one) for one in cell.values()])) if cell else "-" for cell in row]
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join(lines)


def byte_table(records: Sequence[Record]) -> str:
    """Returns a Markdown table with a line for each method and ratio: bytes of keys, values and summaries that a row
    reads, in per cent of all keys and values, and three figures. Samples that not all lines have are left out.
    """
    found, scored = cells(records), {one.name: one.scored for one in compared()}
    shared = set.intersection(*(set(cell) for cell in found.values()))
    lines = [
        f"| {len(shared)} samples | ratio | bytes read, % | next tokens as dense, % | nats | answers right, % |",
        "|---|---|---|---|---|---|",
    ]
    for (method, ratio), cell in found.items():
        kept = [cell[key] for key in sorted(shared, key=str)]
        read = [one.read + (scored[method](one.key.block_size) if method in scored else 0) for one in kept]
        same, nats, right = (bootstrap([figure(one) for one in kept]) for figure in FIGURES)
        shown = f"{nats.mean:.2f} [{nats.low:.2f}, {nats.high:.2f}]"
        lines.append(f"| {method} | {ratio:.0%} | {100 * np.mean(read):.0f} | {same} | {shown} | {right} |")
    return "\n".join(lines)


FIGURES: tuple[Callable[[Record], float], ...] = (lambda one: one.same, lambda one: one.nats, lambda one: one.score)


def differences(records: Sequence[Record]) -> Iterator[str]:
    """Yields, for each other method and ratio, how much it differs from the default at this ratio, sample by sample."""
    found = cells(records)
    for (method, ratio), cell in found.items():
        base = found.get((DEFAULT, ratio), {})
        both = sorted(set(cell) & set(base), key=str)
        if method == DEFAULT or not both:
            continue
        same = bootstrap([cell[key].same - base[key].same for key in both])
        nats = bootstrap([cell[key].nats - base[key].nats for key in both])
        shown = f"{nats.mean:+.2f} [{nats.low:+.2f}, {nats.high:+.2f}]"
        yield f"{method} less {DEFAULT} at {ratio:.0%}: {same} points of next tokens, {shown} nats; {len(both)} samples"


def task_table(records: Sequence[Record], ratio: float) -> str:
    """Returns a Markdown table at one ratio: tasks over methods, mean scores in %, and the number of samples."""
    found = cells(records)
    methods = list(dict.fromkeys(record.method for record in records))
    lines = [f"| task | samples | {' | '.join(methods)} |", f"|---|---|{'---|' * len(methods)}"]
    for task in dict.fromkeys(record.key.task for record in records):
        shown, samples = [], 0
        for method in methods:
            cell = found.get((method, 1.0 if method == DENSE else ratio), {})
            scores = [100 * record.score for record in cell.values() if record.key.task == task]
            samples = max(samples, len(scores))
            shown.append(f"{np.mean(scores):.0f}" if scores else "-")
        lines.append(f"| {task} | {samples} | {' | '.join(shown)} |")
    return "\n".join(lines)


def goals(records: Sequence[Record], ratio: float = GOAL_RATIO) -> Iterator[str]:
    """Yields, for each task that dense attention solves and for all of these together, how the methods with a goal
    compare with exact top-k and with Quest.
    """
    found = {sides: one for sides, one in cells(records).items() if sides[1] == ratio or sides[0] == DENSE}
    scores = {method: {key: one.score for key, one in cell.items()} for (method, _), cell in found.items()}
    by_task: dict[str, list[float]] = defaultdict(list)
    for key, score in scores.get(DENSE, {}).items():
        by_task[str(key[0])].append(score)
    solved = [task for task, of_task in by_task.items() if np.mean(of_task) >= SOLVED]
    for tasks in [*([task] for task in solved), solved] if len(solved) > 1 else [solved]:
        for mine, quest in product(WITH_A_GOAL, QUESTS):
            sides = [scores.get(name, {}) for name in (mine, EXACT, quest)]
            shared = sorted((key for key in set.intersection(*map(set, sides)) if key[0] in tasks), key=str)
            if not shared:
                continue
            own, exact, other = ([side[key] for key in shared] for side in sides)
            behind, ahead = (bootstrap(np.subtract(a, b).tolist()) for a, b in ((exact, own), (own, other)))
            few = len(shared) < FEW
            close = _verdict(behind.high <= BEHIND_EXACT, behind.low > BEHIND_EXACT, few)
            better = _verdict(ahead.low >= 0, ahead.high < 0, few)
            yield (
                f"{', '.join(tasks)}, {mine}: {behind} points behind exact top-k ({close}), {ahead} points above "
                f"{quest} ({better}); {len(shared)} samples at {ratio:.0%}"
            )


def _verdict(met: bool, missed: bool, few: bool) -> str:
    """The whole interval decides. One of a few samples may have no width, and says nothing."""
    return "not decided" if few else "met" if met else "not met" if missed else "not decided"


def plot(records: Sequence[Record], path: Path, title: str) -> None:
    """Writes a picture of answers and next tokens over the share of tokens that was read. path: PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, records, lambda record: record.score)
    _curves(right, records, lambda record: record.same)
    left.set_ylabel("answers right, %")
    right.set_ylabel("next tokens as in dense attention, %")
    right.legend(fontsize=8, frameon=False, ncols=2)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _curves(axes: Any, records: Sequence[Record], figure: Callable[[Record], float]) -> None:
    """Draws a line of means for each method, with intervals."""
    found = cells(records)
    methods = [method for method in dict.fromkeys(record.method for record in records) if method != DENSE]
    for number, method in enumerate(methods):
        points = []
        for ratio in sorted(ratio for name, ratio in found if name == method):
            cell = list(found[method, ratio].values())
            score = bootstrap([figure(record) for record in cell])
            points.append((100 * float(np.mean([record.read for record in cell])), score))
        x, y = [point[0] for point in points], [100 * point[1].mean for point in points]
        below = [100 * (point[1].mean - point[1].low) for point in points]
        above = [100 * (point[1].high - point[1].mean) for point in points]
        style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1.2, "elinewidth": 0.6}
        axes.errorbar(x, y, (below, above), color=COLOURS[number % len(COLOURS)], label=method, capsize=2, **style)
    dense = [figure(record) for record in found.get((DENSE, 1.0), {}).values()]
    if dense:
        axes.axhline(100 * float(np.mean(dense)), color="#000000", linestyle=":", linewidth=0.8, label=DENSE)
    axes.set_xlabel("tokens read, % of the context")
