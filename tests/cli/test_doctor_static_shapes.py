"""The doctor's rows on static shapes: the kind of graphs, the strategy, and the files that the server would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.graphs.shapes import COST, LIMITS
from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm.cli.doctor import doctor
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.configuration import static_shape_checks
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file


def rows(device: str | None = "cpu", **graphs: Any) -> dict[str, Check]:
    config = resolve_config({"ucm": {"graphs": {key: _plain(value) for key, value in graphs.items()}}})
    return {check.name: check for check in static_shape_checks(config, device)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize(
    ("device", "lazy", "mode", "found"),
    [
        ("cpu", "1", "auto", "'auto' on cpu: off (steps run at their true shapes)"),
        ("cpu", "1", "eager", "'eager' on cpu: eager (padded to buckets"),
        ("hpu", "1", "auto", "'auto' on hpu: hpu_graph (HPU graphs)"),
        ("hpu", "0", "auto", "'auto' on hpu: compile (buckets through torch.compile)"),
        ("cuda", "1", "capture", "'capture' on cuda: cuda_graph (CUDA graphs)"),
        (None, "1", "auto", "'auto'; no device was chosen"),
    ],
)
def test_the_kind_of_graphs(
    monkeypatch: pytest.MonkeyPatch, device: str | None, lazy: str, mode: str, found: str
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    check = rows(device, mode=mode)["ucm.graphs.mode"]
    assert check.status == ("info" if device is None else "ok")
    assert check.found.startswith(found)


def test_a_mode_that_the_device_has_not() -> None:
    check = rows("cpu", mode="capture")["ucm.graphs.mode"]
    assert (check.status, check.advice) == ("fail", "correct it")
    assert "no graphs to capture on cpu" in check.found


def test_the_strategy_and_its_missing_file() -> None:
    assert rows()["ucm.graphs.strategy"].found == "'auto': padding_aware, at most 64 graphs"
    check = rows(strategy="trace")["ucm.graphs.strategy"]
    assert check.status == "fail"
    assert "needs the file ucm.graphs.trace" in check.found


@pytest.mark.parametrize(
    ("device", "mode", "memory_mode", "shown"),
    [
        ("cpu", "eager", True, True),
        ("hpu", "auto", True, True),
        ("cpu", "auto", True, False),
        ("cpu", "capture", True, False),
        (None, "eager", True, False),
        ("cpu", "eager", False, False),
    ],
)
def test_graphs_for_remainders_are_named_where_there_may_be_some(
    device: str | None, mode: str, memory_mode: bool, shown: bool
) -> None:
    """At true shapes remainders run like all others."""
    config: dict[str, Any] = {"graphs": {"mode": mode}, "ucm_sparse_method": "ESA"}
    config["memory_mode"] = {"enabled": memory_mode}
    found = {check.name: check for check in static_shape_checks(resolve_config({"ucm": config}), device)}
    assert ("graphs for prompt remainders" in found) == shown
    if shown:
        check = found["graphs for prompt remainders"]
        assert (check.status, "a part of ucm.graphs.max_graphs" in check.found) == ("info", True)
        assert check.found.startswith("up to 3 if UcmConnector loads")


def test_graphs_for_sparse_prompts_are_counted() -> None:
    choice = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": {"prompt_ratio": 0.2}}}
    config = {"graphs": {"mode": "eager"}, **choice}
    found = {check.name: check.found for check in static_shape_checks(resolve_config({"ucm": config}), "cpu")}
    assert found["graphs for prompt remainders"].startswith("up to 6 for chunks of prompts that choose (prompt_ratio)")


def test_files_that_can_be_read(tmp_path: Path) -> None:
    buckets, trace = tmp_path / "buckets.yaml", tmp_path / "phases.jsonl"
    write_bucket_file(buckets, BucketSet([ForwardShape("--u", 8, 0, 40)], [4], LIMITS, COST), {})
    write_log(trace, mixed_steps())
    found = rows(buckets=buckets, trace=trace)
    assert found["ucm.graphs.strategy"].found.startswith("'auto': file")
    assert found["ucm.graphs.buckets"].status == found["ucm.graphs.trace"].status == "ok"
    assert "2 forward and 2 logits graphs" in found["ucm.graphs.buckets"].found
    assert "--max-num-seqs 16" in found["ucm.graphs.buckets"].found
    assert "200 steps of" in found["ucm.graphs.trace"].found


@pytest.mark.parametrize("content", [None, "", "not: [", '{"schema": "other/1"}\n', "\x00\xff"])
def test_files_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    for name in ("buckets", "trace"):
        check = rows(**{name: path})[f"ucm.graphs.{name}"]
        assert (check.status, bool(check.advice)) == ("fail", True)
        assert str(path) in check.found


def test_a_log_without_steps(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [])
    assert rows(trace=path)["ucm.graphs.trace"].found.endswith("a log without steps")


def test_a_configuration_with_problems_has_no_rows_but_those() -> None:
    def crash(config: UcmConfig) -> list[Check]:
        raise AssertionError(f"asked about {config}")

    assert list(doctor._of_config('{"graphs": {"mode": "fast"}}', crash)) == []
