"""The Grafana dashboard and docs/guides/metrics.md name all metrics, with labels that exist."""

from __future__ import annotations

import inspect
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.metrics import loggers

from tests.conftest import ROOT
from tests.observability.exposition import scrape
from tests.prefetch.stores import ScriptedStore
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.observability.metric import EARLIER, METRICS
from vllm_gaudi_ucm.observability.room_metrics import (
    MemoryMetrics,
    MemoryModeMetrics,
    PrefetchMetrics,
    SparseMetrics,
    StoreMetrics,
    TransferMetrics,
)
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.protocol.memory_orders import MemoryRates, MemoryTotals
from vllm_gaudi_ucm.store.base import StoreStats

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/gaudi-ucm.json").read_text())


def by_row() -> dict[str, list[dict[str, Any]]]:
    """Panels by the title of their row. A collapsed row holds its own, an open one has them behind it."""
    found: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
            found[title] = list(panel["panels"])
        else:
            found[title].append(panel)
    return found


BY_ROW = by_row()
PANELS = [panel for panels in BY_ROW.values() for panel in panels]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
ROWS = [
    "Service",
    "Traffic by phase",
    "Padding",
    "Time by stage",
    "Buckets",
    "Recompilations and bypasses",
    "Warm-up",
    "Sparse methods",
    "KV stores and prefetch",
    "Memory mode",
    "Preemption and copies",
]
NAME = re.compile(r"\bgaudi_ucm_\w+")
OF_VLLM = re.compile(r"(vllm:\w+)\{([^}]*)\}")
SUFFIXES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}


@pytest.fixture(scope="module")
def names_of_vllm() -> set[str]:
    """Names of samples that the installed vLLM exports."""
    source = inspect.getsource(loggers)
    found = re.findall(r"_(gauge|counter|histogram)_cls\(\s*name=\"(vllm:\w+)\"", source)
    return {name + SUFFIXES[kind] for kind, name in found}


def test_the_first_row_shows_metrics_of_vllm(names_of_vllm: set[str]) -> None:
    queries = [target["expr"] for panel in BY_ROW["Service"] for target in panel["targets"]]
    shown = {name for query in queries for name, _ in OF_VLLM.findall(query)}
    assert shown <= names_of_vllm
    assert {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
    } <= shown
    for query in queries:
        for name, selector in OF_VLLM.findall(query):
            assert set(re.findall(r"(\w+)=~", selector)) <= {"instance", "engine", "model_name"}
            assert ("rate(" in query) == name.endswith(("_total", "_bucket")), query


def test_rows_that_are_empty_on_a_plain_server_are_collapsed(folder: Path) -> None:
    """Plain: true shapes, no sparse method, store, memory mode, swap or copy."""
    metrics = StepMetrics(folder)
    shape = Bucket("csu", 9, 1, 3, 2)
    metrics.step(shape, shape)
    metrics.times(1.0, 2.0, 3.0)
    exported = {key.partition("{")[0] for key in scrape(folder)}
    for row in (panel for panel in DASHBOARD["panels"] if panel["type"] == "row"):
        queries = ["".join(target["expr"] for target in panel["targets"]) for panel in BY_ROW[row["title"]]]
        has_figures = [set(NAME.findall(query)) <= exported for query in queries]
        assert row["collapsed"] is not all(has_figures), row["title"]


def test_bytes_seconds_and_counts_have_axes_of_their_own() -> None:
    for panel in PANELS:
        kinds: dict[str, str] = {}
        for target in panel["targets"]:
            in_bytes = re.search(r"_bytes", target["expr"]) is not None
            in_seconds = re.search(r"_seconds", target["expr"]) is not None
            kinds[target["legendFormat"]] = "bytes" if in_bytes else "seconds" if in_seconds else "counts"
        shared = re.search(r'event=~"([^"]*)"', panel["targets"][0]["expr"])
        if shared is not None:
            assert len({"bytes" in event for event in shared[1].split("|")}) == 1, panel["title"]
        assert len(set(kinds.values())) == 1 or panel["fieldConfig"]["overrides"], panel["title"]


def test_every_event_of_memory_is_shown(exported: dict[str, dict[str, set[str]]]) -> None:
    shown = {
        event
        for query in QUERIES
        for events in re.findall(r'gaudi_ucm_memory_events_total\{[^}]*event=~"([^"]*)"', query)
        for event in events.split("|")
    }
    assert shown == exported["gaudi_ucm_memory_events_total"]["event"]


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
    metrics.chosen_tokens(3)
    SparseMetrics(metrics.file)
    StoreMetrics(metrics.file, "file").set(StoreStats(kind="file"))
    PrefetchMetrics(metrics.file, "connector").set(PrefetchEngine(ScriptedStore(), 1, PrefetchOptions()).stats())
    TransferMetrics(metrics.file)
    MemoryModeMetrics(metrics.file)
    MemoryMetrics(metrics.file).set(MemoryTotals(density=0.9), MemoryRates(1.0, 2.0, 3.0))
    found: dict[str, dict[str, set[str]]] = {}
    for key in scrape(folder):
        name, _, labels = key.partition("{")
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            found.setdefault(name, {}).setdefault(label, set()).add(value)
    return found


def test_panels_show_exactly_what_is_exported(exported: dict[str, Any]) -> None:
    shown = {name for query in QUERIES for name in NAME.findall(query)}
    assert exported.keys() == {metric.sample_name for metric in METRICS}
    assert shown == exported.keys() - {metric.sample_name for metric in EARLIER}


def test_queries_use_labels_that_exist(exported: dict[str, dict[str, set[str]]]) -> None:
    for query in QUERIES:
        selectors = re.findall(r"(gaudi_ucm_\w+)\{([^}]*)\}", query)
        assert len(selectors) == len(NAME.findall(query)), query
        grouped = {label for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query) for label in group.split(", ")}
        known = {"instance"} | {label for name, _ in selectors for label in exported[name]}
        if OF_VLLM.search(query):
            known |= {"engine", "model_name", "le"}
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
    ids = [panel["id"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] + [panel["id"] for panel in PANELS]
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
    for together in (DASHBOARD["panels"], *BY_ROW.values()):
        cells = {panel["id"]: panel["gridPos"] for panel in together}
        assert all(cell["x"] + cell["w"] <= 24 for cell in cells.values())
        for (one, a), (other, b) in combinations(cells.items(), 2):
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            apart = apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert apart, f"panels {one} and {other}"


def test_the_documentation_lists_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(gaudi_ucm_\w+)` \|([^|]*)\|", (ROOT / "docs/guides/metrics.md").read_text(), re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert listed == {metric.sample_name: metric.labels for metric in METRICS}
