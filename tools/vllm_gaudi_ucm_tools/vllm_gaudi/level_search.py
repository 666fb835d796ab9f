"""The cheapest levels of two sizes for a demand: levels of the first size, and for each of them levels of the second.

A bucket is (first, second). A demand runs at the lowest first level that holds it, and there at the lowest second
level. Each first level ends with a given largest second level, so that it holds all demands. For a number of buckets
the search finds the optimum among its candidates, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Candidates of each size, and second levels of a first one: more cost time and win little.
MOST_FIRST, MOST_SECOND, MOST_LEVELS = 40, 72, 32


@dataclass(frozen=True)
class Demand:
    """Points with their number of runs.

    first, second, count: [n]. ends: all first levels that are allowed, ascending; the last one holds every point.
    must: first levels that every choice has, of `ends`. top: largest second size of a first level.
    seconds: modelled, of arrays of first and second sizes.
    """

    first: Ints
    second: Ints
    count: Floats
    ends: Sequence[int]
    must: frozenset[int]
    top: Callable[[int], int]
    seconds: Callable[[Floats, Floats], Floats]


@dataclass(frozen=True)
class Curve:
    """The least seconds by number of buckets, from 0 on (infinite if there are too few), and how to reach them.

    levels: for each number the buckets.
    """

    seconds: Floats
    levels: Callable[[int], list[tuple[int, int]]]


def search(demand: Demand, most: int, report: Callable[[float], None] = lambda done: None) -> Curve:
    """Returns the best choices of up to `most` buckets."""
    ends = _candidates(
        _rounded_up(demand.first, demand.ends), demand.count, MOST_FIRST, demand.must | {demand.ends[-1]}
    )
    depth = min(MOST_LEVELS, most)
    best = np.full((len(ends) + 1, most + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    inner: dict[tuple[int, int], _Inner] = {}
    for place, end in enumerate(ends, 1):
        # levels that every choice has cannot lie inside of another one's range
        low = max((p for p in range(1, place) if ends[p - 1] in demand.must), default=0)
        for start in range(low, place):
            floor = ends[start - 1] if start else -1
            part = _Inner.of(demand, floor, end, depth)
            inner[start, place] = part
            for count in range(1, depth + 1):
                total = best[start, : most + 1 - count] + part.seconds[count]
                better = np.flatnonzero(total < best[place, count:])
                best[place, count + better] = total[better]
                came.update({(place, count + int(spot)): (start, count) for spot in better})
        report(place / len(ends))

    def levels(number: int) -> list[tuple[int, int]]:
        place, found = len(ends), []
        while place:
            start, count = came[place, number]
            found += [(ends[place - 1], second) for second in inner[start, place].levels(count)]
            place, number = start, number - count
        return sorted(set(found))

    return Curve(best[len(ends)], levels)


class _Inner:
    """Second levels for the points whose first size is in a range. seconds: [depth + 1] the least by their number."""

    def __init__(self, values: list[int], seconds: Floats, came: Ints) -> None:
        self._values, self.seconds, self._came = values, seconds, came

    @classmethod
    def of(cls, demand: Demand, floor: int, end: int, depth: int) -> _Inner:
        """Searches for the points with a first size above `floor` and up to `end`."""
        inside = (demand.first > floor) & (demand.first <= end)
        top = demand.top(end)
        second = np.minimum(demand.second[inside], top)
        values = _candidates(second, demand.count[inside], MOST_SECOND, frozenset((top,)))
        edges = np.array([-1, *values])
        counts = np.histogram(second, edges + 0.5, weights=demand.count[inside])[0]
        each = demand.seconds(np.full(len(values), float(end)), np.array(values, np.float64))
        above = np.concatenate(([0.0], np.cumsum(counts)))
        # [from, to] seconds of all points above value `from` that run at value `to`
        step = (above[None, 1:] - above[:-1, None]) * each[None, :]
        step[np.tril_indices(len(values), -1)] = np.inf
        best, came = np.full((depth + 1, len(values) + 1), np.inf), np.zeros((depth + 1, len(values) + 1), np.int64)
        best[0, 0] = 0.0
        for level in range(1, depth + 1):
            total = best[level - 1, :-1, None] + step
            came[level, 1:] = total.argmin(axis=0)
            best[level, 1:] = total.min(axis=0)
        return cls(values, best[:, -1], came)

    def levels(self, count: int) -> list[int]:
        found, place = [], len(self._values)
        for level in range(count, 0, -1):
            found.append(self._values[place - 1])
            place = int(self._came[level, place])
        return found


def _rounded_up(sizes: Ints, allowed: Sequence[int]) -> Ints:
    """Returns the lowest allowed size that holds each size; the last one for larger sizes."""
    steps = np.asarray(allowed, np.int64)
    return steps[np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)]


def _candidates(holds: Ints, count: Floats, most: int, must: frozenset[int]) -> list[int]:
    """Returns up to about `most` of these sizes, ascending: all that must be, and some that split the runs evenly."""
    distinct, where = np.unique(holds, return_inverse=True)
    if len(distinct) > most:
        runs = np.bincount(where, count)
        # rare large sizes matter as much as frequent small ones, so that a part of the candidates ignores the runs
        weight = runs / max(runs.sum(), 1.0) + 1.0 / len(distinct)
        marks = np.cumsum(weight) / weight.sum()
        distinct = distinct[np.unique(np.searchsorted(marks, np.linspace(0.0, 1.0, most + 1)[1:] - 1e-9))]
    return sorted({*distinct.tolist(), *must})
