"""What a KV connector moves to and from the device's blocks, for /metrics."""

from __future__ import annotations

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile

EVENTS = ("loaded", "recomputed", "saved", "unsaved")


class TransferMetrics:
    """Series of totals. `set` may be called in another thread than the one that made them."""

    def __init__(self, file: MetricsFile) -> None:
        self._events = [file.series(metric.KV_BLOCKS, event) for event in EVENTS]
        self._found = [file.series(metric.KV_BLOCKS, event) for event in ("hit", "missed")]
        self._lookups = [file.series(metric.KV_LOOKUPS, result) for result in ("answered", "timeout")]

    def set(self, loaded: int, recomputed: int, saved: int, unsaved: int) -> None:
        """Blocks since the start.

        loaded: filled from the store. recomputed: were to be, and failed or came late. saved: copied off the device
        and stored. unsaved: not stored, because too many were on their way or the store refused.
        """
        for series, count in zip(self._events, (loaded, recomputed, saved, unsaved), strict=True):
            series.set(count)

    def set_lookups(self, requests: int, timeouts: int, hit_blocks: int, missed_blocks: int) -> None:
        """What the scheduler's side has counted since the start.

        requests: that the store was asked about; timeouts: for which it answered too late. hit_blocks: of these
        requests' blocks those that are to be loaded; missed_blocks: the others.
        """
        for series, count in zip(self._lookups, (requests - timeouts, timeouts), strict=True):
            series.set(count)
        for series, count in zip(self._found, (hit_blocks, missed_blocks), strict=True):
            series.set(count)
