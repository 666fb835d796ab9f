"""Operators that Gaudi's bridge computes on the host, as its metric `cpu_fallback` counts them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Fallbacks:
    """Prints as nothing where there were none."""

    def __init__(self) -> None:
        self.text = ""

    def read(self, stats: list[tuple[str, Any]]) -> None:
        """Takes over what the metric counted."""
        counted = dict(stats)
        if counted.get("TotalNumber"):
            self.text = f" ({counted['TotalNumber']} on the host: {counted.get('FallbackOps', '')})"

    def __str__(self) -> str:
        return self.text


@contextmanager
def fallbacks(kind: str) -> Iterator[Fallbacks]:
    """Counts what falls back inside; nothing where the device, or its build, has no such metric."""
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
