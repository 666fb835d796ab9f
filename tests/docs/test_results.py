"""Pages of results: a part has the whole step on its device, and each table its date, command and peer or limit."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT

DOCS = ROOT / "docs"
PAGES = (DOCS / "results.md", *sorted((DOCS / "results").glob("*.md")))
SECTIONS: dict[str, str] = {
    title: text
    for page in PAGES
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.M | re.S)
}
MEASURED = {title: text for title, text in SECTIONS.items() if "|---" in text}


def device(title: str) -> str:
    """Of a heading such as "Attention of one layer on a CPU"; empty where it names none."""
    return title.rpartition(" on ")[2] if " on " in title else ""


def test_a_part_has_the_whole_beside_it() -> None:
    """covers: F9"""
    whole = {device(title) for title in MEASURED if title.startswith("Whole ")}
    parts = {device(title) for title in MEASURED} - whole - {""}
    assert {"a CPU", "an H200"} <= whole
    assert not parts


def test_every_table_says_when_and_with_which_command_it_was_measured() -> None:
    """A table that is modelled has no day."""
    assert len(MEASURED) >= 20
    for title, text in MEASURED.items():
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", text) or title.endswith(", modelled"), title
        assert re.search(r"`(make bench|gaudi-ucm |.*python -m benchmarks\.)", text), title


def test_every_table_has_a_peer_or_a_limit() -> None:
    for title, text in MEASURED.items():
        assert re.search(r"\*\*(Peers?|peers?|Limit)\*\*", text), title
