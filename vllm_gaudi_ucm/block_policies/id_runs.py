"""A set of block ids, stored as runs, which finds the run to take ids from by binary search."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator


class IdRuns:
    """A set of block ids as runs `[start, end)` that do not touch each other.

    Each operation does a few binary searches for each run that it changes.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # the same runs, by length and by start
        self._by_length: list[tuple[int, int]] = []
        self._in_order: list[int] = []
        self._count = 0
        self.add(ids)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start in self._in_order:
            yield from range(start, self._ends[start])

    def __contains__(self, number: int) -> bool:
        return self._start_of(number) is not None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Returns `[start, end)` of each run, in ascending order."""
        return [(start, self._ends[start]) for start in self._in_order]

    def add(self, ids: Iterable[int]) -> None:
        """Adds ids that are not in the set."""
        for start, end in _runs_of(ids):
            self._count += end - start
            before, after = self._starts.get(start), self._ends.get(end)
            if before is not None:
                self._forget(before, start)
            if after is not None:
                self._forget(end, after)
            self._keep(start if before is None else before, end if after is None else after)

    def discard(self, number: int) -> bool:
        """Removes one id; returns whether it was in the set."""
        start = self._start_of(number)
        if start is not None:
            self._cut(start, number, number + 1)
        return start is not None

    def take(self, count: int, after: int, expected: int) -> list[int]:
        """Removes and returns at most `count` ids: first those right after id `after`, then others in ascending order.

        After the run that begins at `after + 1` comes the shortest run that holds `expected` ids, of which these are
        the first; if there is none, the shortest that holds the remaining ids of `count`, and then the longest,
        repeatedly. Among runs of equal length the first is taken.
        """
        taken: list[int] = []
        if after + 1 in self._ends:
            taken = self._first(after + 1, count)
            expected -= len(taken)
        others: list[int] = []
        while self._count and (missing := count - len(taken) - len(others)) > 0:
            others += self._first(self._fitting(max(expected, missing), missing), missing)
        others.sort()
        return taken + others

    def take_apart(self, count: int, after: int, expected: int) -> list[int]:
        """Removes and returns at most `count` ids: first those right after id `after`, then some of the longest run.

        They leave as much of that run before them as after the `expected` ids of which they are the first, so that the
        owner of the ids before it can continue, too.
        """
        taken = self._first(after + 1, count) if after + 1 in self._ends else []
        while self._count and (missing := count - len(taken)) > 0:
            longest = self._by_length[-1][0]
            start = self._by_length[bisect_left(self._by_length, (longest, 0))][1]
            spare = max(0, longest - max(missing, expected - len(taken)))
            first = start + spare // 2
            end = min(first + missing, start + longest)
            self._cut(start, first, end)
            taken += range(first, end)
        return taken

    def lowest(self, count: int, below: int) -> list[int]:
        """Returns at most `count` ids below `below`, in ascending order; they stay in the set."""
        found: list[int] = []
        for start in self._in_order:
            if start >= below or len(found) == count:
                break
            found += range(start, min(self._ends[start], below, start + count - len(found)))
        return found

    def _fitting(self, expected: int, missing: int) -> int:
        """Returns the start of the run to take ids from."""
        for wanted in (expected, missing):
            at = bisect_left(self._by_length, (wanted, 0))
            if at < len(self._by_length):
                return self._by_length[at][1]
        longest = self._by_length[-1][0]
        return self._by_length[bisect_left(self._by_length, (longest, 0))][1]

    def _first(self, start: int, count: int) -> list[int]:
        """Removes and returns the first ids of a run."""
        end = min(self._ends[start], start + count)
        self._cut(start, start, end)
        return list(range(start, end))

    def _cut(self, start: int, low: int, high: int) -> None:
        """Removes `[low, high)` from the run that begins at `start`."""
        end = self._ends[start]
        self._forget(start, end)
        if start < low:
            self._keep(start, low)
        if high < end:
            self._keep(high, end)
        self._count -= high - low

    def _start_of(self, number: int) -> int | None:
        at = bisect_right(self._in_order, number) - 1
        if at < 0 or number >= self._ends[self._in_order[at]]:
            return None
        return self._in_order[at]

    def _keep(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        insort(self._by_length, (end - start, start))
        insort(self._in_order, start)

    def _forget(self, start: int, end: int) -> None:
        del self._ends[start], self._starts[end]
        del self._by_length[bisect_left(self._by_length, (end - start, start))]
        del self._in_order[bisect_left(self._in_order, start)]


def _runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields `[start, end)` of the runs in ids of any order."""
    ordered = sorted(ids)
    start = 0
    for at in range(1, len(ordered) + 1):
        if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
            yield ordered[start], ordered[at - 1] + 1
            start = at
