"""The Grafana dashboard and docs/guides/metrics.md name all metrics, with labels that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.observability.exposition import scrape
from tests.prefetch.stores import ScriptedStore
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.observability.metric import METRICS
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.protocol.memory_orders import MemoryRates, MemoryTotals
from vllm_gaudi_ucm.store.base import StoreStats

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/gaudi-ucm.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
ROWS = [
    "Traffic by phase",
    "Padding",
    "Buckets",
    "Recompilations and bypasses",
    "Warm-up",
    "Time by stage",
    "Sparse methods",
    "KV stores and prefetch",
    "Memory mode",
    "Preemption and copies",
]
NAME = re.compile(r"\bgaudi_ucm_\w+")


@pytest.fixture
def exported(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Values by label by name of sample, after one of everything."""
    metrics = StepMetrics(folder)
    metrics.step(Bucket("csu", 9, 1, 3, 2), Bucket("csu", 16, 8, 8, 4))
    metrics.times(1.0, 2.0, 3.0)
    metrics.bypass("some reason")
    metrics.host_read("tokens")
    metrics.host_stage("drafts by n-grams")
    metrics.warm_up(1, 2, 3.0, 1.0)
    metrics.native_graphs()
    metrics.sparse()
    metrics.store("file").set(StoreStats(kind="file"))
    metrics.prefetch("connector").set(PrefetchEngine(ScriptedStore(), 1, PrefetchOptions()).stats())
    metrics.transfer()
    metrics.memory_mode()
    metrics.memory().set(MemoryTotals(density=0.9), MemoryRates(1.0, 2.0, 3.0))
    found: dict[str, dict[str, set[str]]] = {}
    for key in scrape(folder):
        name, _, labels = key.partition("{")
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            found.setdefault(name, {}).setdefault(label, set()).add(value)
    return found


def test_panels_show_exactly_what_is_exported(exported: dict[str, Any]) -> None:
    shown = {name for query in QUERIES for name in NAME.findall(query)}
    assert shown == exported.keys() == {metric.sample_name for metric in METRICS}


def test_queries_use_labels_that_exist(exported: dict[str, dict[str, set[str]]]) -> None:
    for query in QUERIES:
        selectors = re.findall(r"(gaudi_ucm_\w+)\{([^}]*)\}", query)
        assert len(selectors) == len(NAME.findall(query)), query
        grouped = {label for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query) for label in group.split(", ")}
        known = {"instance"} | {label for name, _ in selectors for label in exported[name]}
        assert grouped <= known, query
        for name, selector in selectors:
            for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', selector):
                assert label in {"instance", *exported[name]}, query
                assert operator == "=~" or value in exported[name][label], query


def test_counters_are_rated_and_gauges_are_not() -> None:
    for metric in METRICS:
        for query in (query for query in QUERIES if metric.sample_name + "{" in query):
            rated = re.search(rf"(rate|increase)\({metric.sample_name}{{", query) is not None
            total_of_all_time = query == f'sum({metric.sample_name}{{instance=~"$instance",engine=~"$engine"}})'
            assert rated == (metric.kind == "counter") or total_of_all_time, query


def test_grafana_can_import_it() -> None:
    assert DASHBOARD["id"] is None, "an id belongs to one Grafana"
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    for panel in PANELS:
        sources = {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]}
        assert sources == {"${datasource}"}, panel["title"]
        assert panel["description"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
    used = {name for query in QUERIES for name in re.findall(r"\$(\w+)", query)}
    assert used - {"__rate_interval", "__range"} <= variables.keys()


def test_panels_do_not_overlap() -> None:
    cells = {panel["id"]: panel["gridPos"] for panel in DASHBOARD["panels"]}
    assert all(cell["x"] + cell["w"] <= 24 for cell in cells.values())
    for (one, a), (other, b) in combinations(cells.items(), 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, f"panels {one} and {other}"


def test_the_documentation_lists_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(gaudi_ucm_\w+)` \|([^|]*)\|", (ROOT / "docs/guides/metrics.md").read_text(), re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert listed == {metric.sample_name: metric.labels for metric in METRICS}
