"""Places for blocks in host memory: how many there are, and who has which."""

from __future__ import annotations

from collections.abc import Sequence


class HostSlots:
    """Numbers of slots, each for one block of all layers and workers.

    Args:
        count: of all slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # the lowest first: memory is taken from the system as slots are used
        self._free = list(range(count))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many slots; None where there are fewer."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, slots: Sequence[int]) -> None:
        """Slots that are free again."""
        self._free.extend(reversed(slots))

    def check_integrity(self, held: Sequence[int]) -> None:
        """Conservation: every slot is free or held, once."""
        if sorted([*self._free, *held]) != list(range(self.count)):
            raise AssertionError(f"host slots: {self.count}, free {sorted(self._free)}, held {sorted(held)}")
