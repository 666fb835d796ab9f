"""Writes docs/models.md from docs/models.toml. usage: python scripts/support_matrix.py"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
DEVICES = {
    "cpu": ("CPU", "A small model of the family gives the same tokens as in Transformers, in float32."),
    "gaudi": (
        "Gaudi",
        "On the [simulated card](contributing.md#the-simulated-card), which is no Gaudi.",
    ),
    "cuda": ("CUDA", "On an NVIDIA H200, by scripts that are run by hand; the kernels have tests of their own."),
}
REFUSED = "refused: "
INTRO = """# Model families

This page shows the tests of each family. **✓**: a test or a script shows it. **✗**: the engine refuses it by name at
start; the list names alternatives. **?**: unknown; no test has run, but nothing prevents it.
Other decoders with full attention that vLLM implements load the same way. [What is supported](support.md) has
what is the same for every family.

The table behind this page, with the test of every cell, is `docs/models.toml`. `python scripts/support_matrix.py`
writes the page.
"""


def load() -> dict[str, Any]:
    return tomllib.loads((DOCS / "models.toml").read_text(encoding="utf-8"))


def cells(table: dict[str, Any], family: str, device: str) -> dict[str, str]:
    """Feature -> test, or "refused: ..."; cells of the family that it resembles are its own, too."""
    entry = table["families"][family]
    like = table["families"].get(entry.get("like"), {})
    return {**like.get("refused", {}), **entry.get("refused", {}), **entry.get(device, {})}


def page(table: dict[str, Any]) -> str:
    sections = (line for device in DEVICES for line in _section(table, device))
    return "\n".join([INTRO, *_features(table), *sections, *_remedies(table)]) + "\n"


def _features(table: dict[str, Any]) -> Iterator[str]:
    yield "| feature | |"
    yield "|---|---|"
    yield from (f"| {name} | {meaning} |" for name, meaning in table["features"].items())


def _section(table: dict[str, Any], device: str) -> Iterator[str]:
    """Lists families with a test on the device, and whether there are others."""
    name, how = DEVICES[device]
    tested = [family for family, entry in table["families"].items() if device in entry]
    others = "" if len(tested) == len(table["families"]) else " The other families are unknown."
    yield f"\n## {name}\n\n{how}{others}\n"
    yield "| family | " + " | ".join(table["features"]) + " |"
    yield "|---|" + "---|" * len(table["features"])
    for family in tested:
        found = cells(table, family, device)
        marks = (_mark(found.get(feature)) for feature in table["features"])
        yield f"| {table['families'][family]['title']} | " + " | ".join(marks) + " |"


def _remedies(table: dict[str, Any]) -> Iterator[str]:
    remedies: dict[str, list[str]] = {}
    for family, entry in table["families"].items():
        for feature, cell in cells(table, family, "refused").items():
            remedies.setdefault(f"{feature}: {cell.removeprefix(REFUSED)}", []).append(entry["title"])
    yield "\n## Refused\n"
    yield from (f"- {remedy} ({'; '.join(families)})" for remedy, families in remedies.items())


def _mark(cell: str | None) -> str:
    return "?" if cell is None else "✗" if cell.startswith(REFUSED) else "✓"


if __name__ == "__main__":
    (DOCS / "models.md").write_text(page(load()), encoding="utf-8")
