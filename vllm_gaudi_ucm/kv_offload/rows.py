"""Places of copies: how many blocks can be off the device is fixed when the engine starts."""

from __future__ import annotations

from collections.abc import Iterable


class Rows:
    """Numbers 0 to `num_rows`, each free or taken."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free row, None where all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, rows: Iterable[int]) -> None:
        self._free.extend(rows)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Conservation: every row is free or taken, once."""
        if sorted([*self._free, *taken]) != list(range(self.num_rows)):
            raise AssertionError(f"rows of blocks that are away: free {sorted(self._free)}, taken {sorted(taken)}")
