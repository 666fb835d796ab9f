"""The doctor's rows on sparse methods."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.cli.doctor import doctor
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.configuration import SPARSE, sparse_checks
from vllm_gaudi_ucm.config.ucm_config import resolve_config


def rows(method: str | None, **sections: Any) -> dict[str, Check]:
    config = resolve_config({"ucm": {"ucm_sparse_method": method, "ucm_sparse_config": sections}})
    return {check.name: check for check in sparse_checks(config)}


def test_no_method() -> None:
    found = rows(None)
    assert list(found) == ["ucm.ucm_sparse_method"]
    assert (found["ucm.ucm_sparse_method"].status, found["ucm.ucm_sparse_method"].found) == (
        "info",
        "null: every request is dense",
    )
    assert "GSA, ESA, KVStar" in found["ucm.ucm_sparse_method"].expected


def test_method_with_its_options() -> None:
    """covers: C24. From which context on requests are sparse."""
    found = rows("GSA", GSA={"sparse_ratio": 0.25})
    assert found["ucm.ucm_sparse_method"].status == "ok"
    assert "sparse_ratio=0.25, local_window_sz=2" in found["GSA"].found
    contexts = found["contexts that are sparse"].found
    assert contexts.startswith("from 2,048 tokens (with --block-size 128)")
    assert contexts.endswith("3 blocks are always attended and 1 of 13 chosen")


def test_kvstar_over_its_base() -> None:
    found = rows("KVStar", KVStar={"base_method": "ESA"}, ESA={"min_tokens": 4096})
    assert 'base_method="ESA"' in found["KVStar"].found
    assert "min_tokens=4096" in found["KVStar"].found
    assert found["contexts that are sparse"].found.startswith("from 4,096 tokens")
    assert not [check for check in found.values() if check.status == "warn"]


def test_options_without_effect() -> None:
    """covers: C4"""
    assert rows(None, GSA={"min_blocks": 9})["ucm.ucm_sparse_config.GSA"].status == "warn"
    found = rows("GSA", ESA={"min_blocks": 9})["ucm.ucm_sparse_config.ESA"]
    assert (found.status, found.advice) == ("warn", "set ucm.ucm_sparse_method to ESA, or remove the section")


def test_memory_mode(tmp_path: Path) -> None:
    """On, off with options that do nothing, and with a store that must make a round trip."""

    def found(**mode: Any) -> dict[str, Check]:
        config = resolve_config({"ucm": {"ucm_sparse_method": "GSA", "memory_mode": mode}})
        return {check.name: check for check in sparse_checks(config)}

    assert "ucm.memory_mode" not in found()
    assert found(on_device_ratio=0.7)["ucm.memory_mode"].status == "warn"
    row = found(enabled=True)["ucm.memory_mode"]
    assert (row.status, row.found) == (
        "ok",
        "on: 50% of a context's full blocks stay on the device; copies in host memory",
    )
    rows_with_store = found(enabled=True, store={"kind": "file", "path": str(tmp_path / "kv")})
    assert any(check.section == "store" and check.status == "ok" for check in rows_with_store.values())
    (tmp_path / "no folder").write_text("")
    broken = found(enabled=True, store={"kind": "file", "path": str(tmp_path / "no folder")})
    assert any(check.section == "store" and check.status == "fail" for check in broken.values())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the sections that look at the configuration."""
    monkeypatch.setattr(doctor, "PluginChecks", lambda: SimpleNamespace(rows=lambda: ()))
    monkeypatch.setattr(doctor, "detect_device", lambda: None)
    for section in ("version_checks", "thread_checks"):
        monkeypatch.setattr(doctor, section, lambda: ())


def section_of(text: str) -> list[Check]:
    return [check for check in doctor.examine(text).checks if check.section == SPARSE]


@pytest.mark.usefixtures("quick")
def test_section_of_the_report() -> None:
    """covers: C24"""
    assert [check.name for check in section_of('{"ucm_sparse_method": "ESA"}')] == [
        "ucm.ucm_sparse_method",
        "ESA",
        "contexts that are sparse",
    ]
    assert [check.found for check in section_of("{}")] == ["null: every request is dense"]


@pytest.mark.usefixtures("quick")
def test_wrong_options_are_rows_of_the_configuration() -> None:
    """covers: C19"""
    text = '{"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_ration": 0.2}}}'
    assert section_of(text) == []
    (problem,) = [check for check in doctor.examine(text).checks if check.status == "fail"]
    assert (problem.section, problem.name) == ("configuration", "ucm.ucm_sparse_config.GSA.sparse_ration")
    assert "sparse_ratio" in problem.expected
