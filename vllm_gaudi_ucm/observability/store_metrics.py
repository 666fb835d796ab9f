"""What a KV store does, for /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile

if TYPE_CHECKING:
    from vllm_gaudi_ucm.store.base import StoreStats

EVENTS = ("hits", "misses", "saves", "evictions", "corrupt", "errors", "untouched", "timeouts")
BREAKER = {"closed": 0, "half_open": 1, "open": 2}


class StoreMetrics:
    """Series of one store's totals. `set` may be called in another thread than the one that made them.

    name: the value of the label `store`, such as the store's kind.
    """

    def __init__(self, file: MetricsFile, name: str) -> None:
        self._events = {event: file.series(metric.STORE_EVENTS, name, event) for event in EVENTS}
        self._bytes = [file.series(metric.STORE_BYTES, name, direction) for direction in ("loaded", "saved")]
        self._seconds = [file.series(metric.STORE_SECONDS, name, direction) for direction in ("loaded", "saved")]
        self._held = file.series(metric.STORE_HELD, name)
        self._breaker = file.series(metric.STORE_BREAKER, name)

    def set(self, stats: StoreStats) -> None:
        """Totals since the store was opened."""
        for event, series in self._events.items():
            series.set(getattr(stats, event))
        for series, count in zip(self._bytes, (stats.bytes_loaded, stats.bytes_saved), strict=True):
            series.set(count)
        for series, seconds in zip(self._seconds, (stats.load_seconds, stats.save_seconds), strict=True):
            series.set(seconds)
        self._held.set(stats.bytes)
        self._breaker.set(BREAKER[stats.breaker])
