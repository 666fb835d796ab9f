"""Entry point `vllm.stat_logger_plugins`: puts the plugin's metrics on the API server's /metrics."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from vllm_gaudi_ucm.observability.folder import metrics_folder, remove_files
from vllm_gaudi_ucm.observability.reporter import MetricsCollector
from vllm_gaudi_ucm.vllm_api.metrics import AggregateStatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.metrics import IterationStats, MultiModalCacheStats, SchedulerStats


class UcmStatLogger(AggregateStatLoggerBase):
    """One per server, for all its engines. What vLLM reports step by step it leaves to vLLM's own loggers."""

    _registered: MetricsCollector | None = None

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        folder = metrics_folder(vllm_config.instance_id)
        if UcmStatLogger._registered is not None:
            # As vLLM does with its own: the newest engine of a process is the one on /metrics.
            REGISTRY.unregister(UcmStatLogger._registered)
        UcmStatLogger._registered = MetricsCollector(folder)
        REGISTRY.register(UcmStatLogger._registered)
        # A worker that was killed leaves its files behind.
        atexit.register(remove_files, folder)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Nothing: the worker's files are read when Prometheus asks."""

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""
