"""Figures of stores, of the prefetch engine and of the connector arrive with the values that were counted."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.observability.exposition import scrape
from tests.observability.step_metrics import total
from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore, eventually, keys
from vllm_gaudi_ucm.observability.reporter import MetricsReporter
from vllm_gaudi_ucm.observability.room_metrics import PrefetchMetrics, StoreMetrics, TransferMetrics
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.store.base import StoreStats


def test_figures_of_a_store(folder: Path) -> None:
    """covers: D4"""
    series = StoreMetrics(StepMetrics(folder).file, "file")
    counts = {"hits": 5, "misses": 4, "saves": 3, "evictions": 2, "corrupt": 1, "errors": 7, "timeouts": 8}
    counts |= {"untouched": 9, "front_hits": 6}
    sums = {"bytes_loaded": 640, "bytes_saved": 320, "load_seconds": 0.5, "save_seconds": 0.25, "bytes": 192}
    series.set(StoreStats(kind="file", breaker="half_open", **counts, **sums))  # type: ignore[arg-type]
    seen = scrape(folder)
    assert {name: seen[total("store_events_total", store="file", event=name)] for name in counts} == counts
    assert seen[total("store_bytes_total", store="file", direction="loaded")] == 640
    assert seen[total("store_bytes_total", store="file", direction="saved")] == 320
    assert seen[total("store_seconds_total", store="file", direction="loaded")] == 0.5
    assert seen[total("store_seconds_total", store="file", direction="saved")] == 0.25
    assert seen[total("store_held_bytes", store="file")] == 192
    assert seen[total("store_breaker", store="file")] == 1
    series.set(StoreStats(kind="file", breaker="open"))
    assert scrape(folder)[total("store_breaker", store="file")] == 2


def test_figures_of_an_engine(folder: Path) -> None:
    series = PrefetchMetrics(StepMetrics(folder).file, "connector")
    store = ScriptedStore(range(4))
    engine = PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(prefetch_workers=1, max_pending_prefetch=2))
    engine.start()
    assert engine.submit_prefetch("a", keys(0, 1)).wait(60) is PrefetchOutcome.READY
    assert engine.submit_prefetch("b", keys(0, 9)).wait(60) is PrefetchOutcome.FAILED
    store.gate.clear()
    engine.submit_prefetch("c", keys(2))
    assert eventually(lambda: store.running == 1)
    engine.submit_prefetch("d", keys(3, 1, 2), PrefetchPriority.LOW)
    engine.submit_prefetch("e", keys(3), PrefetchPriority.LOW)
    assert engine.wait_for_completion("c", 0.01) is PrefetchOutcome.TIMEOUT
    series.set(engine.stats())
    seen = scrape(folder)
    by_outcome = {"ready": 1, "failed": 2, "timeout": 0, "cancelled": 0}
    found = {name: seen[total("prefetches_total", use="connector", outcome=name)] for name in by_outcome}
    assert found == by_outcome
    by_result = {"loaded": 2, "cached": 1, "shared": 0, "miss": 1, "error": 0, "undelivered": 0, "no_room": 0}
    results = {name: seen[total("prefetch_blocks_total", use="connector", result=name)] for name in by_result}
    assert results == by_result
    assert seen[total("prefetch_queue_blocks", use="connector", priority="low")] == 3
    assert seen[total("prefetch_waits_total", use="connector", result="complete")] == 2
    assert seen[total("prefetch_waits_total", use="connector", result="timeout")] == 1
    assert seen[total("prefetch_wait_seconds_total", use="connector")] > 0
    assert seen[total("prefetch_shed_total", use="connector")] == 1
    assert seen[total("prefetch_threads_replaced_total", use="connector")] == 0
    assert seen[total("prefetch_cache_bytes", use="connector")] == engine.stats().cache_bytes > 0
    store.gate.set()
    assert engine.stop(5)


def test_figures_of_a_connector(folder: Path) -> None:
    series = TransferMetrics(StepMetrics(folder).file)
    series.set(loaded=4, recomputed=3, saved=2, unsaved=1)
    series.set_lookups(requests=9, timeouts=2, hit_blocks=7, missed_blocks=6)
    seen = scrape(folder)
    found = {name: seen[total("kv_blocks_total", event=name)] for name in ("loaded", "recomputed", "saved", "unsaved")}
    assert found == {"loaded": 4, "recomputed": 3, "saved": 2, "unsaved": 1}
    assert [seen[total("kv_blocks_total", event=event)] for event in ("hit", "missed")] == [7, 6]
    assert [seen[total("kv_lookups_total", result=result)] for result in ("answered", "timeout")] == [7, 2]


def test_totals_are_reported_while_nothing_runs_and_at_the_end() -> None:
    calls: list[int] = []
    others = set(threading.enumerate())
    reporter = MetricsReporter(lambda: calls.append(1), seconds=0.01)
    assert eventually(lambda: len(calls) >= 3)
    reporter.close()
    count = len(calls)
    reporter.close()
    assert len(calls) == count
    assert not any(thread.name == "ucm-metrics" for thread in set(threading.enumerate()) - others)


def test_a_report_that_fails_is_tried_again() -> None:
    calls: list[int] = []

    def report() -> None:
        calls.append(1)
        raise RuntimeError("closed")

    reporter = MetricsReporter(report, seconds=0.01)
    assert eventually(lambda: len(calls) >= 2)
    reporter.close()
