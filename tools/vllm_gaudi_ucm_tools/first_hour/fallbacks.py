"""Operators that Gaudi's bridge computes on the host, as its metric `cpu_fallback` counts them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Fallbacks:
    """Operators that fell back; prints as an empty string if there were none."""

    def __init__(self) -> None:
        self.text = ""

    def read(self, stats: list[tuple[str, Any]]) -> None:
        """Reads the counts of the metric."""
        counted = dict(stats)
        if counted.get("TotalNumber"):
            self.text = f" ({counted['TotalNumber']} on the host: {counted.get('FallbackOps', '')})"

    def __str__(self) -> str:
        return self.text


@contextmanager
def fallbacks(kind: str) -> Iterator[Fallbacks]:
    """Counts fallbacks inside the context; none if the device, or its build, has no such metric."""
    found = Fallbacks()
    with ExitStack() as stack:
        metric: Any = None
        if kind == "hpu":
            metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
            try:
                metric = stack.enter_context(metrics.metric_localcontext("cpu_fallback"))
            except Exception:  # a build without the metric
                metric = None
        yield found
        if metric is not None:
            found.read(metric.stats())
