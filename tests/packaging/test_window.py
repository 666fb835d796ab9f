"""The window of versions: its pairs, its small suite, what a run of it keeps, and the table of docs/support.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.run_window import keep, print_table, run_pair
from scripts.window_page import PAGE, RESULTS, page, table
from scripts.window_suite import PairResult, load, read_report
from tests.docs.commands import ROOT
from vllm_gaudi_ucm.vllm_api.versions import WINDOWS

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SUITE = load()
HERE = f"{version('vllm').split('+')[0]}-{version('torch').split('+')[0]}"


def variable(name: str) -> str:
    """Of the Makefile."""
    found = re.search(rf"^{name} := (.*)$", MAKEFILE, re.M)
    assert found, name
    return found[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.run_window", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_pairs_are_the_makefiles() -> None:
    newest = f"{variable('VLLM_VERSION')}-{variable('TORCH_VERSION')}"
    assert variable("WINDOW_PAIRS").replace("$(NEWEST_PAIR)", newest).split() == list(SUITE.pairs)
    assert set(variable("GAUDI_PAIRS").split()) <= set(SUITE.pairs)


def test_every_pair_is_one_that_the_plugin_starts_with() -> None:
    for pair in SUITE.pairs:
        assert all(window.holds(found) for window, found in zip(WINDOWS, pair.split("-"), strict=True)), pair


def test_the_oldest_pair_is_tested_before_a_change_is_taken() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"oldest={next(iter(SUITE.pairs))}\n" in text
    assert 'stage make test-window PAIR="$oldest"\n' in text


def test_every_part_names_tests_that_exist() -> None:
    assert set(SUITE.left_out) <= set(SUITE.parts)
    for name in [test for tests in (*SUITE.parts.values(), *SUITE.left_out.values()) for test in tests]:
        path, *inner = name.split("::")
        assert (ROOT / path).exists(), name
        assert all(f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8") for test in inner)


def test_the_page_has_the_results() -> None:
    """`python -m scripts.window_page` writes it anew."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(results["pairs"]) <= set(SUITE.pairs)
    text = PAGE.read_text(encoding="utf-8")
    assert table(results) in text
    assert page(text, results) == text


REPORT = """<testsuites><testsuite>
<testcase classname="tests.sim.test_card" name="test_one[a]" file="tests/sim/test_card.py" line="3" time="1.0"/>
<testcase classname="tests.sim.test_card" name="test_two" file="tests/sim/test_card.py"><failure/></testcase>
<testcase classname="tests.sparse.test_base" name="test_x" file="tests/sparse/test_base.py"><skipped/></testcase>
<testcase classname="" name="tests.connector.test_options" time="0"><error message="import"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_by_parts(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    result = PairResult("0.33.0", "2.14.0", "3.11.1", "2026-01-02")
    read_report(file, SUITE, result)
    assert result.parts == {
        "sparse": {"passed": 0, "failed": 0, "skipped": 1},
        "stores": {"passed": 0, "failed": 1, "skipped": 0},
        "card": {"passed": 1, "failed": 1, "skipped": 0},
    }
    assert result.failed == ["tests/sim/test_card.py::test_two", "tests/connector/test_options.py"]
    assert not result.ok
    shown = table({"pairs": {next(iter(SUITE.pairs)): result.to_dict()}})
    assert "| 1, **1 failed** | 3.11.1 | 2026-01-02 |" in shown
    assert shown.count("not run") > len(SUITE.parts)


def test_an_environment_that_is_missing_or_another_pair(tmp_path: Path) -> None:
    common = ("--venvs", str(tmp_path), "--json", str(tmp_path / "found.json"))
    missing = run("--newest", f"{HERE}={sys.prefix}", *common, "0.1.0-0.2.0")
    assert missing.returncode == 1
    assert "make setup-window PAIR=0.1.0-0.2.0" in missing.stderr
    other = run("--newest", f"0.1.0-0.2.0={sys.prefix}", *common, "0.1.0-0.2.0")
    assert other.returncode == 1
    assert "expected 0.1.0-0.2.0" in other.stderr
    part = run("--newest", f"{HERE}={sys.prefix}", *common, "--part", "nothing", HERE)
    assert part.returncode == 1
    assert "expected one of serve, " in part.stderr


@pytest.mark.slow  # runs tests in processes
def test_a_run_prints_a_table_and_keeps_what_earlier_runs_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file of the suite, on the pair that runs this test."""
    file = tmp_path / "found.json"
    earlier = PairResult("0", "0", "0", "0", {"card": {"passed": 5, "failed": 0, "skipped": 0}})
    file.write_text(json.dumps({"schema": 1, "pairs": {HERE: earlier.to_dict(), "other": {}}}))
    small = replace(SUITE, parts={"sparse": ["tests/sparse/test_budget.py"]})
    result = run_pair(HERE, Path(sys.executable), small, ["sparse"], processes=0)
    assert result.ok
    assert result.parts["sparse"]["passed"] > 3
    keep(file, HERE, result)
    found = json.loads(file.read_text())["pairs"]
    assert set(found) == {HERE, "other"}
    assert found[HERE]["parts"] == {**result.parts, **earlier.parts}
    assert "-".join((found[HERE]["vllm"], found[HERE]["torch"])) == HERE
    capsys.readouterr()
    print_table({HERE: result}, ["sparse"])
    assert f"│ {result.parts['sparse']['passed']} " in capsys.readouterr().out
