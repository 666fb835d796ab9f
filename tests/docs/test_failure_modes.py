"""The page of failure modes and the tags of the tests name the same lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.failure_modes import PAGE, ROOT, lines, tags, with_tests

# written in two pieces: this file has no tag
COVERS = "covers" + ":"
WITHOUT_A_TEST: dict[str, str] = {}
"""Line to the reason why no test can hold it."""


@pytest.fixture(scope="module")
def page() -> dict[str, str]:
    return lines(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    return tags(ROOT / "tests")


def test_every_tag_names_a_line(page: dict[str, str], found: dict[str, set[str]]) -> None:
    assert len(found) > 60
    assert {number: files for number, files in found.items() if number not in page} == {}


def test_every_line_has_a_test_or_says_why_not(page: dict[str, str], found: dict[str, set[str]]) -> None:
    assert {number for number in page if number not in found} == set(WITHOUT_A_TEST)


def test_tags_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f'"""{COVERS} A1 B22. Words."""\n"""{COVERS} C3, D4 (E5)"""\n')
    (tmp_path / "test_b.py").write_text(f'"""{COVERS} A1"""\n"""{COVERS} no number"""\n')
    both = {"test_a.py", "test_b.py"}
    a, b = {"test_a.py"}, {"test_b.py"}
    assert tags(tmp_path) == {"A1": both, "B22": a, "C3": a, "D4": a, "": b}


def test_the_site_names_the_tests(page: dict[str, str], found: dict[str, set[str]]) -> None:
    text = with_tests(PAGE.read_text(encoding="utf-8"), found)
    rows = [line for line in text.splitlines() if line.startswith("| ") and line[2:3].isupper()]
    assert len(rows) == len(page)
    assert all(row.count(" | ") == 2 and "`" in row.rpartition(" | ")[2] for row in rows)
