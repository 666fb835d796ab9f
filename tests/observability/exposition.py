"""What Prometheus would see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_gaudi_ucm.observability.stat_logger import MetricsCollector

Samples = Mapping[str, float]


def scrape(folder: Path) -> Samples:
    """`name{label="value",...}` to value, labels by name, through the text format and back."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(folder))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found
