"""The walks of docs/architecture.md name files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")
# files in the numbered steps of a walk, by its heading
MOST_FILES = {"The way of a bucket look-up": 12, "The way of a connector load": 15}


def walks() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return NAMED.findall(text)


def numbered_files(heading: str) -> set[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    steps = next(part for part in section if part.startswith(heading))
    return {file for line in steps.splitlines() if line[:1].isdigit() for file, _ in NAMED.findall(line)}


def names_in(file: Path) -> set[str]:
    """Functions, classes, `Class.method` and constants of a file."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_there_is_a_walk() -> None:
    assert len(walks()) >= 12


@pytest.mark.parametrize(("file", "name"), walks())
def test_what_a_walk_names_is_there(file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


@pytest.mark.parametrize(("heading", "most"), MOST_FILES.items())
def test_a_walk_is_short(heading: str, most: int) -> None:
    assert 0 < len(numbered_files(heading)) <= most


HEADINGS = ("The way of a sparse choice",)


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_way_is_a_numbered_walk(heading: str) -> None:
    """From 1 on, without a gap; each number names a file and a function."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    assert not [line for _, line in lines if not NAMED.search(line)]
