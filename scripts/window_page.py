"""Writes the table of tested versions into docs/support.md.

usage: python -m scripts.window_page [FILE]

FILE: the output of `make test-window`; it becomes docs/window.json. Without it the table is made from docs/window.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.window_suite import ROOT, load

RESULTS = ROOT / "docs" / "window.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN = "<!-- versions: written by `python -m scripts.window_page` -->"
END = "<!-- end of versions -->"


def table(results: dict[str, Any]) -> str:
    """The table in Markdown: one row for each pair of the window."""
    return "\n".join(_lines(results))


def _lines(results: dict[str, Any]) -> Iterator[str]:
    suite = load()
    yield "| vLLM | torch | " + " | ".join(suite.parts) + " | Python | date | |"
    yield "|---|---|" + "---|" * len(suite.parts) + "---|---|---|"
    for pair, meaning in suite.pairs.items():
        vllm, torch = pair.split("-")
        found = results["pairs"].get(pair)
        if found is None:
            cells = ["not run"] * len(suite.parts) + ["", ""]
        else:
            cells = [_cell(found["parts"].get(part)) for part in suite.parts] + [found["python"], found["date"]]
        yield f"| {vllm} | {torch} | " + " | ".join(cells) + f" | {meaning} |"


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not run"
    failed = f", **{counts['failed']} failed**" if counts["failed"] else ""
    return f"{counts['passed']}{failed}"


def page(text: str, results: dict[str, Any]) -> str:
    """The page with its table made again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main(arguments: list[str]) -> None:
    if arguments:
        RESULTS.write_text(Path(arguments[0]).read_text(encoding="utf-8"), encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
