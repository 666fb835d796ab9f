"""Totals that other threads keep, brought to /metrics once a second: steps do not pay for them, and idle time shows."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.private_folder import is_private

# What a file that is missing, cut short or overwritten can raise in the reader of prometheus_client.
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


SECONDS = 1.0

logger = plugin_logger(__name__)


class MetricsReporter:
    """Calls `report` every so often in a thread of its own, until `close`; what it raises is logged, once."""

    def __init__(self, report: Callable[[], None], seconds: float = SECONDS) -> None:
        self._report = report
        self._seconds = seconds
        self._closing = threading.Event()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="ucm-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reports a last time, and ends the thread; a second call does nothing."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self._report()
        except Exception as error:
            if not self._is_broken:
                logger.warning("some gaudi_ucm metrics are not reported: %s: %s", type(error).__name__, error)
            self._is_broken = True
