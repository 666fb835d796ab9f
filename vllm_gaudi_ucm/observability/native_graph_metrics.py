"""What the worker counts of graphs of native calls."""

from __future__ import annotations

from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import MetricsFile


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
