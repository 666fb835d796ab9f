"""Table and page of vLLM's own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from tests.conformance.expectations import Expectations, Group, Rule
from tests.conformance.outcome import Outcome
from tests.conformance.report import PAGE, RESULTS, page, save, terminal_table

OUTCOMES = [
    Outcome("scheduler", "tests/v1/core/test_b.py::test_x", "passed"),
    Outcome("scheduler", "tests/v1/core/test_a.py::test_x", "passed"),
    Outcome("scheduler", "tests/v1/core/test_a.py::test_y", "expected", "the plugin has its own"),
    Outcome("sampler", "tests/v1/sample/test_s.py", "not run", "needs a GPU"),
    Outcome("sampler", "tests/v1/sample/test_t.py::test_z[1]", "failed", "assert False"),
]
EXPECTATIONS = Expectations(
    tuple(Group(name, (), (), 1.0) for name in ("scheduler", "sampler", "engine")),
    (Rule(("tests/v1/sample/test_s.py",), "needs a GPU", SpecifierSet()),),
    (Rule(("tests/v1/core/test_a.py::test_y",), "the plugin has its own", SpecifierSet()),),
)
FILES = {
    "scheduler": ["tests/v1/core/test_a.py", "tests/v1/core/test_b.py"],
    "sampler": ["tests/v1/sample/test_s.py", "tests/v1/sample/test_t.py"],
    "engine": ["tests/v1/engine/test_e.py"],
}
LATER = [Outcome("sampler", "tests/v1/sample/test_t.py::test_z[1]", "passed")]
ABOUT = {"date": "2026-11-28", "with": "torch 2.13.0"}


def test_a_row_for_each_group_and_file() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(OUTCOMES, files=True))
    rows = [line.split() for line in console.export_text().splitlines()[1:]]
    assert rows == [
        ["scheduler", "2", "1"],
        ["v1/core/test_a.py", "1", "1"],
        ["v1/core/test_b.py", "1"],
        ["sampler", "1", "1"],
        ["v1/sample/test_s.py", "1"],
        ["v1/sample/test_t.py", "1"],
        ["all", "2", "1", "1", "1"],
    ]


def test_the_page_has_versions_counts_and_reasons(tmp_path: Path) -> None:
    results, file = tmp_path / "results.json", tmp_path / "page.md"
    for version in ("0.9.0", "0.33.0"):
        save(EXPECTATIONS, OUTCOMES, {**ABOUT, "vllm": version}, FILES, results=results, page_file=file)
    text = file.read_text(encoding="utf-8")
    assert text.index("## vLLM 0.33.0") < text.index("## vLLM 0.9.0")
    assert "| scheduler | 2026-11-28, torch 2.13.0 | 2 |  |  |  | 1 |  |  |" in text
    assert "| **all** | | 2 | 1 |  |  | 1 |  | 1 |" in text
    assert "| `v1/core/test_a.py::test_y` | the plugin has its own |" in text
    assert "Groups and files without a result for this version: engine." in text
    assert text == page(json.loads(results.read_text()))


def test_a_group_is_renewed_and_others_stay(tmp_path: Path) -> None:
    results, file = tmp_path / "results.json", tmp_path / "page.md"
    about = {**ABOUT, "vllm": "0.33.0"}
    written: dict[str, Any] = {"results": results, "page_file": file}
    save(EXPECTATIONS, OUTCOMES, about, FILES, **written)
    save(EXPECTATIONS, LATER, {**about, "date": "2026-12-01"}, FILES, **written)
    groups = json.loads(results.read_text())["0.33.0"]["groups"]
    assert [(name, run["date"]) for name, run in groups.items()] == [
        ("scheduler", "2026-11-28"),
        ("sampler", "2026-12-01"),
    ]
    assert groups["sampler"]["files"] == {"tests/v1/sample/test_t.py": {"passed": 1}}
    assert "result for this version: engine, tests/v1/sample/test_s.py.\n" in file.read_text(encoding="utf-8")


def test_a_file_is_renewed_and_others_of_its_group_stay(tmp_path: Path) -> None:
    results, file = tmp_path / "results.json", tmp_path / "page.md"
    about = {**ABOUT, "vllm": "0.33.0"}
    written: dict[str, Any] = {"results": results, "page_file": file}
    save(EXPECTATIONS, OUTCOMES, about, FILES, **written)
    save(EXPECTATIONS, LATER, about, FILES, joined=True, **written)
    run = json.loads(results.read_text())["0.33.0"]["groups"]["sampler"]
    assert run["files"] == {"tests/v1/sample/test_s.py": {"not run": 1}, "tests/v1/sample/test_t.py": {"passed": 1}}
    assert run["with"] == "torch 2.13.0, joined from several runs"
    assert "Groups and files without a result for this version: engine." in file.read_text(encoding="utf-8")


def test_the_projects_page_is_that_of_its_data() -> None:
    """`make conformance ARGS="--save"` writes both."""
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", sorted(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else [])
def test_the_projects_data_is_of_a_run_in_which_nothing_failed(version: str) -> None:
    groups = json.loads(RESULTS.read_text(encoding="utf-8"))[version]["groups"]
    kinds = {kind for run in groups.values() for row in run["files"].values() for kind in row}
    assert "passed" in kinds
    assert not kinds & {"failed", "surprise"}
