"""Where the choices of requests are stored on the device, and what the host knows of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np


class ChoiceSlots:
    """A slot per request whose choice may be used again. A request that loses its slot chooses anew.

    Args:
        num_slots: requests that can be running at once.
        width: logical blocks of the longest request.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        # bool [slots, width]: the blocks that competed; int64 [slots]: how many ranks are stored, 0 without a choice
        self.candidates = np.zeros((num_slots, width), np.bool_)
        self.num_stored = np.zeros(num_slots, np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]

    def slot(self, request_id: str, scheduled: Collection[str]) -> int:
        """The request's slot; a new one is taken from a request that is not scheduled where none is free."""
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                self.forget([next(owner for owner in self._slots if owner not in scheduled)])
            slot = self._slots[request_id] = self._free.pop()
            self.num_stored[slot] = 0
        return slot

    def forget(self, request_ids: Iterable[str]) -> None:
        """Frees the slots of requests that have ended, or whose cache is gone; others are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Conservation: every slot is free or owned by exactly one request."""
        if sorted([*self._slots.values(), *self._free]) != list(range(len(self.num_stored))):
            raise AssertionError(f"choice slots: owned {self._slots}, free {self._free}")
