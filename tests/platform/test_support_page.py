"""docs/support.md has the table of what is refused, as the code has it."""

from __future__ import annotations

from pathlib import Path

from vllm_gaudi_ucm.platform.features import REFUSED
from vllm_gaudi_ucm.platform.refused_calls import REFUSED as REFUSED_CALLS

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def shown(template: str) -> str:
    """With the words of docs in the place of values."""
    return template.format(found="...", model="the model")


def flags(asked_by: str) -> str:
    """Flags as code."""
    words = shown(asked_by).replace(" ...", "").split(" or ")
    return " or ".join(f"`{word}`" if word.startswith("--") else word for word in words)


def test_the_page_has_the_table() -> None:
    """In its order, without another row."""
    expected = [f"| {shown(row.name)} | {flags(row.asked_by)} | {row.why} |" for row in REFUSED]
    text = PAGE.read_text(encoding="utf-8").partition("| refused | asked for by | why |\n|---|---|---|\n")[2]
    assert text.partition("\n\n")[0].splitlines() == expected, "paste these rows:\n" + "\n".join(expected)


def test_no_row_twice() -> None:
    names = [row.name for row in REFUSED]
    assert len(set(names)) == len(names) >= 30
    assert all(row.why for row in REFUSED)


def test_calls_say_what_to_do_instead() -> None:
    assert all(refusal.feature and refusal.instead for refusal in REFUSED_CALLS.values())
