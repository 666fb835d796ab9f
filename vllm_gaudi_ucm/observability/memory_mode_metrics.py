"""What memory mode does, for /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile

if TYPE_CHECKING:
    from vllm_gaudi_ucm.protocol.offload_totals import ResidencyTotals

EVENTS = ("saved", "unsaved", "released", "loaded", "failed", "found", "stored")


class MemoryModeMetrics:
    """Series of what the scheduler's side has counted, which travels to the worker with every step."""

    def __init__(self, file: MetricsFile) -> None:
        self._events = {event: file.series(metric.MEMORY_MODE_BLOCKS, event) for event in EVENTS}
        self._away = file.series(metric.MEMORY_MODE_AWAY)
        # a gauge that was never set is not shown
        self._away.set(0)
        self._scorings = [file.series(metric.MEMORY_MODE_SCORINGS, share) for share in ("all", "missed")]
        self._kept = file.series(metric.MEMORY_MODE_KEPT)
        self._repeated = file.series(metric.MEMORY_MODE_REPEATED)

    def set(self, totals: ResidencyTotals) -> None:
        """Totals since the start, and the blocks that are away now."""
        for event, series in self._events.items():
            series.set(getattr(totals, event))
        self._away.set(totals.away)
        for series, count in zip(self._scorings, (totals.scored, totals.missed), strict=True):
            series.set(count)
        self._kept.set(totals.kept)
        self._repeated.set(totals.repeated)
