"""What the prefetch engine does, for /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority

if TYPE_CHECKING:
    from vllm_gaudi_ucm.prefetch.stats import PrefetchStats

BLOCK_RESULTS = {
    "loaded": "blocks_loaded",
    "cached": "blocks_cached",
    "shared": "blocks_shared",
    "miss": "misses",
    "error": "errors",
    "undelivered": "deliver_errors",
    "no_room": "no_room",
}


class PrefetchMetrics:
    """Series of one engine's totals. `set` may be called in another thread than the one that made them.

    use: what the engine works for, `connector` or `memory_mode`; the value of the label `use`.
    """

    def __init__(self, file: MetricsFile, use: str) -> None:
        # No request ends UNKNOWN: it is what is said of a request that there is none of.
        ends = [outcome for outcome in PrefetchOutcome if outcome is not PrefetchOutcome.UNKNOWN]
        self._outcomes = {outcome: file.series(metric.PREFETCHES, use, outcome.value) for outcome in ends}
        self._blocks = {
            total: file.series(metric.PREFETCH_BLOCKS, use, result) for result, total in BLOCK_RESULTS.items()
        }
        self._queue = {
            priority: file.series(metric.PREFETCH_QUEUE, use, priority.name.lower()) for priority in PrefetchPriority
        }
        self._waits = [file.series(metric.PREFETCH_WAITS, use, result) for result in ("complete", "timeout")]
        self._wait_seconds = file.series(metric.PREFETCH_WAIT_SECONDS, use)
        self._shed = file.series(metric.PREFETCH_SHED, use)
        self._threads = file.series(metric.PREFETCH_THREADS, use)
        self._cache = file.series(metric.PREFETCH_CACHE, use)

    def set(self, stats: PrefetchStats) -> None:
        """Totals since the engine was made, and what it holds now."""
        for outcome, series in self._outcomes.items():
            series.set(stats.outcomes[outcome])
        for total, series in self._blocks.items():
            series.set(getattr(stats, total))
        for priority, series in self._queue.items():
            series.set(stats.queue_depth[priority])
        complete, timeout = self._waits
        complete.set(stats.waits - stats.wait_timeouts)
        timeout.set(stats.wait_timeouts)
        self._wait_seconds.set(stats.wait_seconds)
        self._shed.set(stats.shed)
        self._threads.set(stats.threads_replaced)
        self._cache.set(stats.cache_bytes)
