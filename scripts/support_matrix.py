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
what is the same for every family. On several devices Gemma 3n gives other tokens than on one: in vLLM each worker drops
small gates by the mean and deviation of its own part.

The table behind this page, with the test of every cell, is `docs/models.toml`. `python scripts/support_matrix.py`
writes the page.
"""


NO_REFERENCE = "no reference"
VALIDATED = """## What vllm-gaudi has validated

The vendor's plugin, vllm-gaudi, names 56 configurations that it has validated on a Gaudi (revision 091bbadd,
2026-08-21). **None of them has run on a Gaudi here, and none of these weights were loaded**: the marks are copied from
the table above, where small models of the same family run on the simulated card; some families run for this page
alone. A cell is empty if the configuration
does not need the feature. *Here* names the family of the text part, by name and publications of the model, not by its
configuration file. *Without pictures*: the engine refuses pictures of this model by name;
`--language-model-only` serves its text part. *No reference*: Transformers has no such decoder to compare with, so **?**
stays. Other decoders with full attention that vLLM implements load the same
way as the tested ones; vLLM 0.33 loads GPTBigCode (Granite 20B and 34B code) and Hunyuan by its Transformers backend.
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
    return "\n".join([INTRO, *_features(table), *sections, *_remedies(table), *_validated(table)]) + "\n"


def _features(table: dict[str, Any]) -> Iterator[str]:
    yield "| feature | |"
    yield "|---|---|"
    yield from (f"| {name} | {meaning} |" for name, meaning in table["features"].items())


def _section(table: dict[str, Any], device: str) -> Iterator[str]:
    """Lists families with a test on the device, and whether there are others."""
    name, how = DEVICES[device]
    listed = [family for family, entry in table["families"].items() if not entry.get("for_validated")]
    tested = [family for family in listed if device in table["families"][family]]
    others = "" if len(tested) == len(listed) else " The other families are unknown."
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


def _validated(table: dict[str, Any]) -> Iterator[str]:
    """Lists the vendor's configurations, with the cells of their families on the simulated card."""
    yield f"\n{VALIDATED}"
    yield "| model | cards | dtypes | here | in buckets | on several cards | 8-bit weights |"
    yield "|---|---|---|---|---|---|---|"
    for one in table["validated"]:
        family, cards = one.get("family"), one["cards"]
        title = NO_REFERENCE if family is None else table["families"][family]["title"]
        here = f"without pictures ({title})" if "pictures" in one else title
        found = {} if family is None else cells(table, family, "gaudi")
        wanted = [("buckets", True), ("several devices", cards != "1"), ("quantised weights", "FP8" in one["dtypes"])]
        marks = [_mark(found.get(feature)) if is_wanted else "" for feature, is_wanted in wanted]
        yield f"| {one['model']} | {cards} | {one['dtypes']} | {here} | {' | '.join(marks)} |"


def _mark(cell: str | None) -> str:
    return "?" if cell is None else "✗" if cell.startswith(REFUSED) else "✓"


if __name__ == "__main__":
    (DOCS / "models.md").write_text(page(load()), encoding="utf-8")
