"""JSON, page and archive: complete, self-contained, and each written although another cannot be."""

from __future__ import annotations

import errno
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm_tools.first_hour import outputs, plots
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER, QUESTIONS
from vllm_gaudi_ucm_tools.first_hour.hour import Findings, Options
from vllm_gaudi_ucm_tools.first_hour.outputs import ARCHIVE, JSON, PAGE
from vllm_gaudi_ucm_tools.first_hour.page import page
from vllm_gaudi_ucm_tools.first_hour.privacy import Scrubber
from vllm_gaudi_ucm_tools.first_hour.probe import Unit
from vllm_gaudi_ucm_tools.first_hour.result import Ending, judge

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def report() -> dict[str, Any]:
    findings = Findings("hpu", {"device name": "GAUDI3", "memory": [1, 2], "packages": {"torch": "2.11"}})
    events = [
        {"kind": "answer", "name": "recipes", "text": HOSTILE},
        {"kind": "series", "name": "a", "x": "nodes", "y": "s", "points": [[1.0, 2.0], [100.0, 4.0]]},
        {"kind": "series", "name": "empty", "x": "nodes", "y": "s", "points": []},
        {"kind": "end", "status": "done", "text": ""},
    ]
    findings.add(judge(Unit(BY_NUMBER[4], "compile"), Ending(0, events, "log", 1.0)))
    findings.add(judge(Unit(BY_NUMBER[18], "eager"), Ending(-11, [], "", 1.0)))
    return outputs.report(findings, Options(list(BY_NUMBER.values())), Scrubber())


class Tags(HTMLParser):
    """What a page is made of; void elements need no end."""

    VOID = ("meta", "br", "path", "use")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_is_whole_and_needs_no_other_file(report: dict[str, Any]) -> None:
    text = page(report)
    tags = Tags(text)
    assert tags.open == []
    assert "script" not in {tag for tag, _ in tags.seen}
    assert HOSTILE not in text
    loaded = [value for _, attributes in tags.seen for name in ("src", "href") if (value := attributes.get(name))]
    assert not loaded, "a file of its own"
    for result in report["results"]:
        assert result["title"] in text
        assert result["verdict"] in text
    assert all(str(number) in text for number in QUESTIONS)


def test_series_are_plotted(report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    text = page(report)
    assert text.count("<svg") == 1
    assert re.search(r"<figure>.*nodes.*</figure>", text, re.S)


def test_without_matplotlib_the_page_says_so(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    text = page(report)
    assert "<svg" not in text
    assert "matplotlib is not installed" in text


def test_the_answer_stands_at_its_question(report: dict[str, Any]) -> None:
    row = next(line for line in page(report).splitlines() if f"<td>2</td><td>{QUESTIONS[2][:20]}" in line)
    assert "probe 4 compile: recipes: " in row


def test_files(report: dict[str, Any], tmp_path: Path) -> None:
    outcome = outputs.write(report, {}, Scrubber(), tmp_path / "new")
    assert outcome == {JSON: "", PAGE: "", ARCHIVE: ""}
    assert json.loads((tmp_path / "new" / JSON).read_text()) == report
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(outcome)


@pytest.mark.parametrize("broken", [JSON, PAGE, ARCHIVE])
def test_a_full_disk_costs_one_file(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    whole = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if broken in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    outcome = outputs.write(report, {}, Scrubber(), tmp_path)
    assert outcome[broken] == "No space left on device"
    assert {path.name for path in tmp_path.iterdir()} == {JSON, PAGE, ARCHIVE} - {broken}


def test_a_page_that_cannot_be_made_costs_the_page(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(found: Any) -> str:
        raise RuntimeError("no font")

    monkeypatch.setattr(outputs, "page", fail)
    outcome = outputs.write(report, {}, Scrubber(), tmp_path)
    assert outcome == {JSON: "", PAGE: "RuntimeError: no font", ARCHIVE: ""}


def test_a_large_trace_is_left_out(report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("0" * 100)
    monkeypatch.setattr(outputs, "LARGEST_FILE", 99)
    outcome = outputs.write(report, {"trace.json": trace, "gone.json": tmp_path / "gone"}, Scrubber(), tmp_path / "out")
    assert outcome["trace.json"].startswith("left out: larger than")
    assert outcome["gone.json"] == "No such file or directory"
    assert outcome[ARCHIVE] == ""
