"""What a sparse method does, for /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.observability.selection_totals import DeviceCounts, SelectionTotals


class SparseMetrics:
    """Series of totals; setting them costs some ten stores to mapped memory."""

    def __init__(self, file: MetricsFile) -> None:
        self._modes = {mode: file.series(metric.SELECTIONS, mode.name.lower()) for mode in SelectionMode}
        self._blocks = [file.series(metric.SPARSE_BLOCKS, state) for state in ("context", "attended")]
        self._fallbacks = file.series(metric.SPARSE_FALLBACKS)
        self._checkpoints = [file.series(metric.CHECKPOINTS, result) for result in ("kept", "replaced")]
        self._locks = [file.series(metric.LOCKS, event) for event in ("lock", "unlock")]
        self._mass = [file.series(metric.ATTENTION_MASS, state) for state in ("chosen", "candidates")]

    def totals(self, totals: SelectionTotals) -> None:
        """What the host knows, since the start."""
        for mode, count in totals.modes.items():
            self._modes[mode].set(count)
        for series, blocks in zip(self._blocks, (totals.context_blocks, totals.attended_blocks), strict=True):
            series.set(blocks)
        self._fallbacks.set(totals.fallbacks)

    def locks(self, locked: int, unlocked: int) -> None:
        """What the scheduler's side of KVStar has counted, since the start."""
        for series, count in zip(self._locks, (locked, unlocked), strict=True):
            series.set(count)

    def device(self, counts: DeviceCounts) -> None:
        """What only the device knows, since the start."""
        for series, checkpoints in zip(self._checkpoints, (counts.kept, counts.replaced), strict=True):
            series.set(checkpoints)
        for series, mass in zip(self._mass, (counts.chosen_mass, counts.mass), strict=True):
            series.set(mass)
