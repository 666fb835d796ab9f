"""Helpers of `test_metrics.py` that other tests use, too."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.server import HTTP, Server


def read_metrics(server: Server) -> dict[tuple[str, str], float]:
    """The plugin's samples by name and value of the last label (none: empty)."""
    text = HTTP.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert any(sample.name.startswith("vllm:") for sample in samples), "vLLM's own metrics are gone"
    ours = [sample for sample in samples if sample.name.startswith("gaudi_ucm_")]
    assert {sample.labels["engine"] for sample in ours} == {"0"}
    return {(s.name, "".join(v for k, v in s.labels.items() if k != "engine")): s.value for s in ours}
