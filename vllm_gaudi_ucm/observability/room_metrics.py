"""Metrics of the rooms: sparse methods, memory mode, prefetch, stores, transfers and graphs of native calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile, Series
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.prefetch.stats import PrefetchStats
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryRates, MemoryTotals
    from vllm_gaudi_ucm.protocol.offload import OffloadTotals
    from vllm_gaudi_ucm.store.base import StoreStats

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

    use: the user of the engine, `connector` or `memory_mode`; the value of the label `use`.
    """

    def __init__(self, file: MetricsFile, use: str) -> None:
        # No request ends UNKNOWN: it is the outcome of a request that does not exist.
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
        """Sets totals since the engine was made, and its current content."""
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


STORE_EVENTS = ("hits", "front_hits", "misses", "saves", "evictions", "corrupt", "errors", "untouched", "timeouts")
BREAKER = {"closed": 0, "half_open": 1, "open": 2}


class StoreMetrics:
    """Series of one store's totals. `set` may be called in another thread than the one that made them.

    name: the value of the label `store`, such as the store's kind.
    """

    def __init__(self, file: MetricsFile, name: str) -> None:
        self._events = {event: file.series(metric.STORE_EVENTS, name, event) for event in STORE_EVENTS}
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


class SparseMetrics:
    """Series of totals; setting them costs some ten stores to mapped memory."""

    def __init__(self, file: MetricsFile) -> None:
        self._modes = {mode: file.series(metric.SELECTIONS, mode.name.lower()) for mode in SelectionMode}
        self._blocks = [file.series(metric.SPARSE_BLOCKS, state) for state in ("context", "attended")]
        self._fallbacks = file.series(metric.SPARSE_FALLBACKS)
        self._dense_steps = file.series(metric.SPARSE_DENSE_STEPS)
        self._checkpoints = [file.series(metric.CHECKPOINTS, result) for result in ("kept", "replaced")]
        self._locks = [file.series(metric.LOCKS, event) for event in ("lock", "unlock")]
        self._mass = [file.series(metric.ATTENTION_MASS, state) for state in ("chosen", "candidates")]

    def totals(self, totals: SelectionTotals) -> None:
        for mode, count in totals.modes.items():
            self._modes[mode].set(count)
        for series, blocks in zip(self._blocks, (totals.context_blocks, totals.attended_blocks), strict=True):
            series.set(blocks)
        self._fallbacks.set(totals.fallbacks)

    def dense_steps(self, count: int) -> None:
        """Sets the scheduler's decisions since the start."""
        self._dense_steps.set(count)

    def locks(self, locked: int, unlocked: int) -> None:
        """Sets the counts of KVStar's scheduler side since the start."""
        for series, count in zip(self._locks, (locked, unlocked), strict=True):
            series.set(count)

    def device(self, counts: DeviceCounts) -> None:
        """Sets totals that only the device knows, since the start."""
        for series, checkpoints in zip(self._checkpoints, (counts.kept, counts.replaced), strict=True):
            series.set(checkpoints)
        for series, mass in zip(self._mass, (counts.chosen_mass, counts.mass), strict=True):
            series.set(mass)


MEMORY_EVENTS = (
    "copies",
    "copied_tokens",
    "copy_waits",
    "admission_waits",
    "swapped_out",
    "swapped_in",
    "swap_out_bytes",
    "swap_in_bytes",
    "swap_refusals",
    "recomputed_tokens",
    "moves",
)
MEMORY_RATES = ("prefill", "to_host", "from_host")


class MemoryMetrics:
    """Series of the scheduler side's counts, which travel to the worker with every step."""

    def __init__(self, file: MetricsFile) -> None:
        self._file = file
        self._events = {event: file.series(metric.MEMORY_EVENTS, event) for event in MEMORY_EVENTS}
        self._rates = {rate: file.series(metric.MEMORY_RATES, rate) for rate in MEMORY_RATES}
        self._density: Series | None = None

    def set(self, totals: MemoryTotals, rates: MemoryRates) -> None:
        """Sets totals since the start, and the measured rates."""
        for event, series in self._events.items():
            series.set(getattr(totals, event))
        for rate, series in self._rates.items():
            if getattr(rates, rate):
                # a gauge that was never set is not shown
                series.set(getattr(rates, rate))
        if totals.density is not None:
            # without compaction there is no such figure
            self._density = self._density or self._file.series(metric.MEMORY_DENSITY)
            self._density.set(totals.density)


MEMORY_MODE_EVENTS = ("saved", "unsaved", "released", "loaded", "failed", "found", "stored")


class MemoryModeMetrics:
    """Series of the scheduler side's counts, which travel to the worker with every step."""

    def __init__(self, file: MetricsFile) -> None:
        self._events = {event: file.series(metric.MEMORY_MODE_BLOCKS, event) for event in MEMORY_MODE_EVENTS}
        self._offloaded = [file.series(name) for name in (metric.MEMORY_MODE_OFFLOADED, metric.MEMORY_MODE_AWAY)]
        # a gauge that was never set is not shown
        for series in self._offloaded:
            series.set(0)
        self._scorings = [file.series(metric.MEMORY_MODE_SCORINGS, share) for share in ("all", "missed")]
        self._kept = file.series(metric.MEMORY_MODE_KEPT)
        self._repeated = file.series(metric.MEMORY_MODE_REPEATED)

    def set(self, totals: OffloadTotals) -> None:
        """Sets totals since the start, and the blocks that are offloaded now."""
        for event, series in self._events.items():
            series.set(getattr(totals, event))
        for series in self._offloaded:
            series.set(totals.away)
        for series, count in zip(self._scorings, (totals.scored, totals.missed), strict=True):
            series.set(count)
        self._kept.set(totals.kept)
        self._repeated.set(totals.repeated)


class NativeGraphMetrics:
    """Forward passes of a CPU by how they ran: replayed, captured while they ran, or the ordinary way."""

    def __init__(self, file: MetricsFile) -> None:
        self._replayed, self._captured, self._ordinary = (
            file.series(metric.NATIVE_GRAPHS, way) for way in ("replayed", "captured", "ordinary")
        )

    def replayed(self) -> None:
        self._replayed.add(1)

    def captured(self) -> None:
        self._captured.add(1)

    def ordinary(self) -> None:
        self._ordinary.add(1)


TRANSFER_EVENTS = ("loaded", "recomputed", "saved", "unsaved")


class TransferMetrics:
    """Series of totals. `set` may be called in another thread than the one that made them."""

    def __init__(self, file: MetricsFile) -> None:
        self._events = [file.series(metric.KV_BLOCKS, event) for event in TRANSFER_EVENTS]
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
        """Sets the scheduler side's counts since the start.

        requests: requests looked up in the store; timeouts: requests that it answered too late. hit_blocks: blocks of
        these requests to load; missed_blocks: their other blocks.
        """
        for series, count in zip(self._lookups, (requests - timeouts, timeouts), strict=True):
            series.set(count)
        for series, count in zip(self._found, (hit_blocks, missed_blocks), strict=True):
            series.set(count)


class TransferTotals(NamedTuple):
    """Blocks since the start.

    loaded: device blocks filled from the store. recomputed: were to be, and failed or came late. saved: stored.
    unsaved: not stored, because too many were on their way or the store refused.
    """

    loaded: int = 0
    recomputed: int = 0
    saved: int = 0
    unsaved: int = 0

    def since(self, before: TransferTotals) -> TransferTotals:
        return TransferTotals(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass
class SelectionTotals:
    """One count for each sparse request of each step.

    modes: requests by how their selection was made. context_blocks: blocks of their contexts; attended_blocks: those
    attended, selected or always. fallbacks: requests that were dense in a step because their selection had no room.
    """

    modes: dict[SelectionMode, int] = field(default_factory=lambda: dict.fromkeys(SelectionMode, 0))
    context_blocks: int = 0
    attended_blocks: int = 0
    fallbacks: int = 0


class DeviceCounts(NamedTuple):
    """Totals since the start.

    kept, replaced: checks, one for each layer and request. chosen_mass, mass: estimated attention of the chosen blocks,
    and of all candidates, in the last layer that chooses.
    """

    kept: int
    replaced: int
    chosen_mass: float
    mass: float
