"""Memory mode on /metrics."""

from __future__ import annotations

from pathlib import Path

from tests.observability.exposition import scrape
from vllm_gaudi_ucm.observability.room_metrics import MemoryModeMetrics
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.protocol.offload import OffloadTotals


def test_totals_of_the_scheduler(folder: Path) -> None:
    metrics = MemoryModeMetrics(StepMetrics(folder).file)
    totals = OffloadTotals(
        scored=4,
        missed=0.5,
        kept=1,
        saved=9,
        unsaved=2,
        released=8,
        loaded=3,
        failed=1,
        found=5,
        away=7,
        stored=11,
        repeated=6,
    )
    metrics.set(totals)
    found = {key: value for key, value in scrape(folder).items() if "memory_mode" in key}
    assert sorted(found.values()) == sorted([4, 0.5, 1, 9, 2, 8, 3, 1, 5, 7, 7, 11, 6])
    names = ("offloaded", "away")
    offloaded, earlier = (value for name in names for key, value in found.items() if f"memory_mode_{name}{{" in key)
    (failed,) = [value for key, value in found.items() if 'event="failed"' in key]
    assert (offloaded, earlier, failed) == (7, 7, 1)
