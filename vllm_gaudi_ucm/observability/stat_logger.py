"""Entry point `vllm.stat_logger_plugins`: puts the plugin's metrics on the API server's /metrics."""

from __future__ import annotations

import atexit
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_gaudi_ucm.observability.metrics_file import metrics_folder, remove_files
from vllm_gaudi_ucm.private_folder import is_private
from vllm_gaudi_ucm.vllm_api.metrics import AggregateStatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.metrics import IterationStats, MultiModalCacheStats, SchedulerStats


# Exceptions of prometheus_client's reader for a file that is missing, cut short or overwritten.
UNREADABLE = (OSError, RuntimeError, ValueError, TypeError, AttributeError, struct.error)


class MetricsCollector(Collector):
    """The metrics in `folder`; none while it is not there, and never an error: /metrics is not ours alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise the registry would collect at once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        if not is_private(self._folder):
            return
        for kind in ("counter", "gauge_mostrecent"):
            yield from _read(sorted(self._folder.glob(f"{kind}_*.db")))


def _read(files: list[Path]) -> list[Metric]:
    """The metrics of the files that can be read; one engine's broken file does not hide the other engines."""
    readable = [str(file) for file in files if _merge([str(file)]) is not None]
    return _merge(readable) or []


def _merge(files: list[str]) -> list[Metric] | None:
    try:
        return list(MultiProcessCollector.merge(files))
    except UNREADABLE:
        return None


class UcmStatLogger(AggregateStatLoggerBase):
    """The stat logger, one per server for all its engines. vLLM's own loggers keep vLLM's reports on each step."""

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
