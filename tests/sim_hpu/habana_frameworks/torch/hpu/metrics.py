"""Counters of the bridge, with its tags in its order."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.state import state

Stats = list[tuple[str, Any]]
DETAILS, CACHE = "PT_HPU_METRICS_GC_DETAILS", "PT_HPU_ENABLE_CACHE_METRICS"
_YES = ("y", "yes", "t", "true", "on", "1")


class Counts(NamedTuple):
    """All that is counted, at one moment. Times are microseconds. recipes: (name, time) of each compilation."""

    compilations: int
    compiling: int
    recipes: tuple[tuple[str, int], ...]
    fallbacks: Counter[str]
    cache_hits: int
    cache_misses: int

    def since(self, begin: "Counts") -> "Counts":
        return Counts(
            self.compilations - begin.compilations,
            self.compiling - begin.compiling,
            self.recipes[len(begin.recipes) :],
            self.fallbacks - begin.fallbacks,
            self.cache_hits - begin.cache_hits,
            self.cache_misses - begin.cache_misses,
        )


def _now() -> Counts:
    # a recipe that is not found on disk is compiled
    return Counts(
        card.compilations,
        card.compiling_us(),
        tuple(card.recipes),
        card.fallbacks.copy(),
        card.cache_hits,
        card.compilations,
    )


_NOTHING = Counts(0, 0, (), Counter(), 0, 0)


def _graph_compilation(counts: Counts) -> Stats:
    number, time = counts.compilations, counts.compiling
    stats: Stats = [("TotalNumber", number), ("TotalTime", time), ("AvgTime", time / number if number else 0)]
    if _is_set(DETAILS):
        stats.append(("recipe", list(counts.recipes)))
    return stats


def _cpu_fallback(counts: Counts) -> Stats:
    return [("TotalNumber", counts.fallbacks.total()), ("FallbackOps", dict(counts.fallbacks))]


def _memory_defragmentation(counts: Counts) -> Stats:
    """The simulated pool is never in pieces."""
    return [("TotalNumber", 0), ("TotalSuccessful", 0), ("AvgTime", 0), ("MaxTime", 0)]


def _recipe_cache(counts: Counts) -> Stats:
    compiled = Counter(name for name, _ in counts.recipes)
    return [
        ("TotalHit", counts.cache_hits),
        ("RecipeHit", {}),
        ("TotalMiss", counts.cache_misses),
        ("RecipeMiss", dict(compiled)),
    ]


_METRICS: dict[str, Callable[[Counts], Stats]] = {
    "graph_compilation": _graph_compilation,
    "cpu_fallback": _cpu_fallback,
    "memory_defragmentation": _memory_defragmentation,
    "recipe_cache": _recipe_cache,
}


class MetricNotFound(Exception):  # named as in the bridge
    """A metric that does not exist, or that its environment variable has not switched on."""


class Metric:
    """What was counted since it began, until it ended if it has."""

    def __init__(self, name: str, begin: Counts) -> None:
        self._name, self._begin = name, begin
        self._end: Counts | None = None

    def name(self) -> str:
        return self._name

    def stop(self) -> None:
        self._end = self._end or _now()

    def reset(self) -> None:
        """Begins anew."""
        self._begin, self._end = _now(), None

    def stats(self) -> Stats:
        """(tag, value) pairs; times are microseconds. What has not been launched yet is not counted."""
        return _METRICS[self._name]((self._end or _now()).since(self._begin))


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """Counts what happens inside, of all threads. Operators that wait when it ends are launched and counted.

    Raises MetricNotFound.
    """
    if not _exists(name):
        raise MetricNotFound(f"Metric with given name ({name}) doesn't exist.")
    state.cut()
    metric = Metric(name, _now())
    try:
        yield metric
    finally:
        state.cut()
        metric.stop()


def metric_global(name: str) -> Metric | None:
    """Counts since the process began; None for a metric that does not exist."""
    return Metric(name, _NOTHING) if _exists(name) else None


def _exists(name: str) -> bool:
    return name in _METRICS and (name != "recipe_cache" or _is_set(CACHE))


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _YES
