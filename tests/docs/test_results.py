"""docs/results.md: figures of a part stand beside those of whole steps on the same device, dated, with their peer."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT

TEXT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
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
    assert len(MEASURED) >= 6
    for title, text in MEASURED.items():
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", text), title
        assert re.search(r"`make bench", text), title


def test_every_table_has_a_peer_or_a_limit() -> None:
    for title, text in MEASURED.items():
        assert "**Peer" in text or "**peer" in text or "**Limit**" in text, title
