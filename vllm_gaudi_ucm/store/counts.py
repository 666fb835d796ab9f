"""The running totals of a store."""

from __future__ import annotations

import threading

from vllm_gaudi_ucm.store.base import StoreStats


class Counts:
    """Named totals, safe between threads; the names are fields of `StoreStats`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Adds to several totals in one piece."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] = self._totals.get(name, 0) + amount

    def stats(self, **state: object) -> StoreStats:
        """The totals, and the state that the store itself knows."""
        with self._lock:
            return StoreStats(kind=self._kind, **self._totals, **state)  # type: ignore[arg-type]
