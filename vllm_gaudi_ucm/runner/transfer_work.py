"""What a KV connector moved between two steps of the phase log, and how long its calls held the steps up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from vllm_gaudi_ucm.observability.phase_log import StepRecord
from vllm_gaudi_ucm.observability.transfer_totals import TransferTotals

NOTHING = TransferTotals()


class TransferWork:
    """Filled by KvTransfer, taken by the runner when it writes a step."""

    def __init__(self, totals: TransferTotals = NOTHING, moved: TransferTotals = NOTHING, ms: float = 0.0) -> None:
        self._totals = totals
        self.moved = moved
        self.ms = ms
        self.last_seconds = 0.0
        """Of the last call that was timed."""

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Times a call of the connector."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_seconds = time.perf_counter() - start
            self.ms += 1e3 * self.last_seconds

    def take(self, totals: TransferTotals) -> TransferWork:
        """What has come since the last call, of which nothing stays here."""
        taken = TransferWork(totals, totals.since(self._totals), self.ms)
        self._totals, self.ms = totals, 0.0
        return taken

    def noted_in(self, record: StepRecord) -> StepRecord:
        return replace(record, loaded_blocks=self.moved.loaded, saved_blocks=self.moved.saved, transfer_ms=self.ms)
