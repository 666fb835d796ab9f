"""Slots for blocks in host memory, and which of them are free."""

from __future__ import annotations

from collections.abc import Sequence


class HostSlots:
    """The numbers of slots, each for one block of all layers and workers.

    Args:
        count: number of all slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # the lowest first: memory is taken from the system as slots are used
        self._free = list(range(count))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Takes that many slots; returns None if fewer are free."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, slots: Sequence[int]) -> None:
        """Frees slots."""
        self._free.extend(reversed(slots))

    def check_integrity(self, held: Sequence[int]) -> None:
        """Checks that every slot is either free or held, and only once."""
        if sorted([*self._free, *held]) != list(range(self.count)):
            raise AssertionError(f"host slots: {self.count}, free {sorted(self._free)}, held {sorted(held)}")
