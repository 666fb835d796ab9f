"""Finds the tests that hold each line of docs/failure-modes.md, by the tags `covers: A1 B2` in their docstrings."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "failure-modes.md"
TAG = re.compile(r"\bcovers:(?: ([A-Z]\d+(?:,? [A-Z]\d+)*))?")
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \|$", re.MULTILINE)
SHOWN = 3


def lines(text: str) -> dict[str, str]:
    """Returns the lines of the page: their number to the failure."""
    return dict(ROW.findall(text))


def tags(folder: Path) -> dict[str, set[str]]:
    """Returns the files below a folder that name each line; under "" those with a tag that names none."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        for numbers in TAG.findall(file.read_text(encoding="utf-8")):
            for number in re.findall(r"[A-Z]\d+", numbers) or [""]:
                found.setdefault(number, set()).add(file.relative_to(folder).as_posix())
    return found


def with_tests(text: str, found: dict[str, set[str]]) -> str:
    """Returns the page with a column of the files that hold each line; the first three of many."""

    def filled(row: re.Match[str]) -> str:
        files = sorted(found.get(row[1], ()))
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        return f"| {row[1]} | {row[2]} | {', '.join(f'`{file}`' for file in files[:SHOWN])}{more} |"

    text = text.replace("| line | what goes wrong |\n|---|---|", "| line | what goes wrong | tests |\n|---|---|---|")
    return ROW.sub(filled, text)
