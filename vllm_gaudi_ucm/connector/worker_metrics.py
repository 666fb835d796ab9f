"""The worker's figures of stores, loads and saves, brought to /metrics."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi_ucm.observability.reporter import MetricsReporter
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.observability.transfer_totals import TransferTotals
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.store.base import KvStore

USE = "connector"


class WorkerMetrics:
    """Reads totals of objects that count by themselves, until `close`.

    metrics: of the worker. totals: of the connector's blocks.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        store: KvStore,
        engine: PrefetchEngine,
        totals: Callable[[], TransferTotals],
    ) -> None:
        self._store, self._engine, self._totals = store, engine, totals
        self._store_series = metrics.store(store.stats().kind)
        self._engine_series = metrics.prefetch(USE)
        self._transfer_series = metrics.transfer()
        self.lookups = (0, 0, 0, 0)
        """As the scheduler's side last told them."""
        self._reporter = MetricsReporter(self._report)

    def _report(self) -> None:
        self._store_series.set(self._store.stats())
        self._engine_series.set(self._engine.stats())
        self._transfer_series.set(*self._totals())
        self._transfer_series.set_lookups(*self.lookups)

    def close(self) -> None:
        """To be called before what is counted is closed."""
        self._reporter.close()
