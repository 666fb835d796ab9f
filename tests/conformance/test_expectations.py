"""The data file of vLLM's own tests: patterns, versions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.expectations import FILE, load, matches, select

GROUPS = """
[[groups]]
name = "scheduler"
tests = ["tests/v1/core"]
quick = ["tests/v1/core/test_a.py"]
minutes = 5

[[groups]]
name = "sampler"
tests = ["tests/v1/sample"]
minutes = 5
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "expectations.toml"
    file.write_text(GROUPS + text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("test", "pattern", "named"),
    [
        ("tests/a.py::test_x", "tests/a.py", True),
        ("tests/a.py::test_x[1-b]", "tests/a.py::test_x", False),
        ("tests/a.py::test_x[1-b]", "tests/a.py::test_x[1-b]", True),
        ("tests/a.py::test_x[1-b]", "tests/a.py::test_x[*]", True),
        ("tests/a.py::test_x[1-b]", "tests/a.py::test_x*", True),
        ("tests/a.py::test_x1", "tests/a.py::test_x[1]", False),
        ("tests/ab.py::test_x", "tests/a.py", False),
        ("tests/a/b.py::test_x", "tests/a/*", True),
    ],
)
def test_patterns(test: str, pattern: str, named: bool) -> None:
    assert matches(test, pattern) is named


def test_rules_of_other_versions_do_not_apply(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
[[not_run]]
tests = ["tests/v1/core/test_old.py"]
reason = "needs a GPU"
vllm = "<0.33"

[[expected_to_fail]]
tests = ["tests/v1/core/test_a.py::test_b"]
reason = "the plugin has its own"
""",
    )
    assert [rule.reason for rule in load("0.32.0+empty", file).not_run] == ["needs a GPU"]
    assert load("0.33.0", file).not_run == ()
    assert len(load("0.33.0", file).expected_to_fail) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[not_run]]\ntests = ["tests/a.py"]', "an entry has tests, a reason"),
        ('[[not_run]]\ntests = ["tests/a.py"]\nreason = " "', "an entry has tests, a reason"),
        ('[[not_run]]\ntests = []\nreason = "x"', "an entry has tests, a reason"),
        ('[[not_ran]]\ntests = ["tests/a.py"]\nreason = "x"', "found \\['not_ran'\\]; expected groups"),
        ('[[not_run]]\ntests = ["tests/a.py", "tests/a.py"]\nreason = "x"', "tests/a.py .* is listed 2 times"),
    ],
)
def test_wrong_entries_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load("0.32.0", written(tmp_path, text))


def test_groups_are_selected_by_name_and_by_quick(tmp_path: Path) -> None:
    groups = load("0.32.0", written(tmp_path, "")).groups
    assert [group.name for group in select(groups, [], quick=False)] == ["scheduler", "sampler"]
    assert [group.name for group in select(groups, ["sampler"], quick=False)] == ["sampler"]
    assert [group.tests for group in select(groups, [], quick=True)] == [("tests/v1/core/test_a.py",)]
    with pytest.raises(ValueError, match="--group samplers: no such group; choose from scheduler, sampler"):
        select(groups, ["samplers"], quick=False)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_projects_own_file_is_right(version: str) -> None:
    found = load(version, FILE)
    tests = [test for group in found.groups for test in (*group.tests, *group.quick)]
    assert all(test.startswith("tests/") for test in tests)
    for group in found.groups:
        assert all(quick.startswith(group.tests) for quick in group.quick), group.name
    for rule in (*found.not_run, *found.expected_to_fail):
        assert all(pattern.startswith(tuple(tests)) for pattern in rule.tests), rule
