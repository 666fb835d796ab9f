"""Findings for people, as text, and for machines, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from scripts.drift.findings import ABSTRACT, CHANGED, MOVED, VANISHED, Finding

_TITLES = {
    VANISHED: "Vanished",
    MOVED: "Moved",
    ABSTRACT: "New abstract members",
    CHANGED: "Changed so that the code does not work",
}
_HARMLESS = "Changed, but the code still fits"
_MOST_PLACES = 6


def as_json(findings: Sequence[Finding], named: str, rows: int) -> str:
    """All findings as one object: the version, the rows of the table, how many are broken, and each finding."""
    broken = sum(finding.is_broken for finding in findings)
    found = [asdict(finding) for finding in findings]
    return json.dumps({"vllm": named, "contracts": rows, "broken": broken, "findings": found}, indent=2)


def print_report(findings: Sequence[Finding], named: str, rows: int, console: Console) -> None:
    """Prints the findings by kind of change; the last line counts them."""
    for line in _lines(findings):
        console.print(line, soft_wrap=True, highlight=False)
    broken = sum(finding.is_broken for finding in findings)
    console.print(
        f"vLLM {named}: {rows} contracts, {broken} broken, {len(findings) - broken} changed that still fit.",
        soft_wrap=True,
        highlight=False,
    )


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for kind, title in _TITLES.items():
        yield from _section(title, [one for one in findings if one.kind == kind and one.is_broken])
    yield from _section(_HARMLESS, [one for one in findings if not one.is_broken])


def _section(title: str, findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        return
    yield f"[bold]{title}[/bold]\n"
    for finding in findings:
        yield f"[bold]{escape(finding.name)}[/bold]"
        yield f"  {escape(finding.says)}"
        if finding.was:
            yield f"  was  {escape(finding.was[-1])}"
        if finding.now:
            yield f"  now  {escape(finding.now)}"
        for place in finding.places[:_MOST_PLACES]:
            yield f"  at   {escape(place)}"
        if len(finding.places) > _MOST_PLACES:
            yield f"  at   {len(finding.places) - _MOST_PLACES} places more"
        yield ""
