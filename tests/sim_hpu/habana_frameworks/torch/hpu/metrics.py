"""Counters of the bridge: `graph_compilation` and `recipe_cache`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.state import state

Stats = list[tuple[str, float]]


def _compilations() -> tuple[int, ...]:
    return card.compilations, card.compiling_us()


def _recipe_cache() -> tuple[int, ...]:
    return card.cache_hits, card.compilations


def _compilation_stats(counts: tuple[int, ...]) -> Stats:
    number, time = counts
    return [
        ("TotalNumber", number),
        ("TotalTime", time),
        ("AvgTime", time // number if number else 0),
    ]


def _recipe_cache_stats(counts: tuple[int, ...]) -> Stats:
    return list(zip(("TotalHit", "TotalMiss"), counts, strict=True))


_METRICS: dict[str, tuple[Callable[[], tuple[int, ...]], Callable[[tuple[int, ...]], Stats]]] = {
    "graph_compilation": (_compilations, _compilation_stats),
    "recipe_cache": (_recipe_cache, _recipe_cache_stats),
}


class Metric:
    """What was counted since it began, until it ended if it has."""

    def __init__(self, name: str, begin: tuple[int, ...] | None = None) -> None:
        self._count, self._stats = _METRICS[name]
        self._begin = begin if begin is not None else tuple(0 for _ in self._count())
        self._end: tuple[int, ...] | None = None

    def end(self) -> None:
        self._end = self._count()

    def stats(self) -> Stats:
        """(name, value) pairs; times are microseconds. What has not been launched yet is not counted."""
        now = self._end if self._end is not None else self._count()
        return self._stats(tuple(after - before for before, after in zip(self._begin, now, strict=True)))


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """Counts what happens inside, of all threads. Operators that wait when it ends are launched and counted."""
    state.cut()
    metric = Metric(name, _METRICS[name][0]())
    try:
        yield metric
    finally:
        state.cut()
        metric.end()


def metric_global(name: str) -> Metric:
    """Counts since the process began."""
    return Metric(name)
