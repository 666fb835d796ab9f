"""The page of a report: one HTML file with tables and plots, which needs no other file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from vllm_gaudi_ucm_tools.first_hour.catalogue import QUESTIONS
from vllm_gaudi_ucm_tools.first_hour.plots import plot, why_no_plots

COLOURS = {
    "as expected": "#2e7d32",
    "answered": "#1565c0",
    "differs": "#c62828",
    "failed": "#c62828",
    "timed out": "#e65100",
    "interrupted": "#e65100",
    "does not apply here": "#757575",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: .35em .6em; text-align: left; vertical-align: top; }
th { background: #f5f5f5; position: sticky; top: 0; }
td { overflow-wrap: anywhere; }
.verdict { font-weight: 600; white-space: nowrap; }
pre { background: #f5f5f5; padding: .8em; overflow: auto; max-height: 30em; font-size: 12px; }
summary { cursor: pointer; }
figure { display: inline-block; margin: .5em; }
"""


def page(report: Mapping[str, Any]) -> str:
    """Returns the page. report: from `outputs.report`, which has no private data."""
    return "\n".join(_page(report))


def _page(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
    yield f"<title>First hour on {escape(report['device'])}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>First hour on {escape(_name(report))}</h1>"
    counted = ", ".join(f"{count} {verdict}" for verdict, count in report["verdicts"].items())
    yield f"<p>{escape(counted or 'no probe ran')}. Every figure was measured in this run, none is modelled.</p>"
    if report["interrupted"]:
        yield "<p><strong>The run was interrupted; this is what ran until then.</strong></p>"
    yield from _machine(report["machine"])
    yield "<h2>Probes</h2>"
    yield from _results(report["results"])
    yield "<h2>Plots</h2>"
    yield from _plots(report["results"])
    yield "<h2>Open questions</h2>"
    yield from _questions(report["results"])
    yield "<h2>Raw data</h2>"
    yield from _raw(report["results"])
    yield "</body></html>"


def _name(report: Mapping[str, Any]) -> str:
    name = report["machine"].get("device name")
    return f"{report['device']} ({name})" if name else str(report["device"])


def _machine(machine: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Machine</h2><table>"
    for name, value in machine.items():
        if isinstance(value, str | int | float) and value not in ("", None):
            yield f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        elif name == "memory":
            yield f"<tr><th>memory</th><td>{escape(str(value))} bytes (free, total)</td></tr>"
    yield "</table>"
    for name in ("environment", "packages"):
        if isinstance(machine.get(name), Mapping):
            lines = "\n".join(f"{key}={value}" for key, value in machine[name].items())
            yield _folded(name, lines)
    for tool, text in machine.get("tools", {}).items():
        yield _folded(tool, text)


def _results(results: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "<table><tr><th>no.</th><th>probe</th><th>expected</th><th>found</th><th>verdict</th><th>s</th></tr>"
    for result in results:
        how = " ".join(filter(None, (result["mode"], result["case"])))
        colour = COLOURS[result["verdict"]]
        cells = (
            str(result["number"]),
            escape(result["title"]) + (f"<br><small>{escape(how)}</small>" if how else ""),
            escape(result["expected"]),
            escape(result["found"]),
            f"<span class='verdict' style='color:{colour}'>{escape(result['verdict'])}</span>",
            f"{result['seconds']:.1f}",
        )
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _plots(results: list[Mapping[str, Any]]) -> Iterator[str]:
    drawn = [result for result in results if result["data"].get("series")]
    if reason := why_no_plots():
        yield f"<p>{escape(reason)}</p>"
        return
    for result in drawn:
        title = f"{result['number']}: {result['title']} ({result['mode']})"
        yield f"<figure>{plot(title, result['data']['series'])}</figure>"
    if not drawn:
        yield "<p>No probe that ran has a series of figures.</p>"


def _questions(results: list[Mapping[str, Any]]) -> Iterator[str]:
    """Each with the probes whose expectation names it."""
    from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER

    yield "<table><tr><th>no.</th><th>question</th><th>what was found</th></tr>"
    for number, text in QUESTIONS.items():
        mine = [one for one in results if number in BY_NUMBER[one["number"]].questions and one["data"].get("answer")]
        lines = [
            f"probe {one['number']} {one['mode']}: {answer['name']}: {answer['text']}"
            for one in mine
            for answer in one["data"]["answer"]
        ]
        cell = "<br>".join(map(escape, lines)) or "no probe of this run says anything"
        yield f"<tr><td>{number}</td><td>{escape(text)}</td><td>{cell}</td></tr>"
    yield "</table>"


def _raw(results: list[Mapping[str, Any]]) -> Iterator[str]:
    for result in results:
        if result["data"]:
            name = " ".join(filter(None, (str(result["number"]), result["mode"], result["case"])))
            data = {key: value for key, value in result["data"].items() if key != "log"}
            yield _folded(name, json.dumps(data, indent=1) + "\n\n" + result["data"].get("log", ""))


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
