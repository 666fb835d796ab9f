"""Reads the figures of all engines of a server when Prometheus asks for them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_gaudi_ucm.observability.folder import is_private

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
