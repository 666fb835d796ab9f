"""docs/gaudi.md: every open question with probes that exist, every figure with its label, what is not in a report."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT
from vllm_gaudi_ucm.envs import REPORTED
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER, PROBES, QUESTIONS
from vllm_gaudi_ucm_tools.first_hour.result import Verdict

TEXT = (ROOT / "docs" / "gaudi.md").read_text(encoding="utf-8")
LABELS = ("modelled", "measured", "not known")


def section(title: str) -> str:
    """Of the page, without its heading."""
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_open_question_has_the_probes_that_answer_it() -> None:
    """covers: F10"""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| ([\d, ]+) \|$", section("Open questions"), re.M)
    found = {int(number): (text, [int(probe) for probe in probes.split(",")]) for number, text, probes in rows}
    expected = {
        number: (text, [probe.number for probe in PROBES if number in probe.questions])
        for number, text in QUESTIONS.items()
    }
    assert found == expected
    assert all(probes for _, probes in found.values())


def test_probes_that_the_text_names_exist() -> None:
    named = [
        int(number) for words in re.findall(r"[Pp]robes? ([\d, and]+)", TEXT) for number in re.findall(r"\d+", words)
    ]
    assert len(named) > 4
    assert set(named) <= BY_NUMBER.keys()


def test_every_figure_is_labelled_with_its_source_and_date() -> None:
    """covers: F10"""
    table = section("Tuning").rsplit("\n\n", 1)[-1]
    rows = [line.split("|") for line in table.strip().splitlines()[2:]]
    assert len(rows) >= 4
    for _, figure, label, source, date, _ in rows:
        assert label.strip() in LABELS, figure
        assert source.strip(), figure
        assert re.fullmatch(r"20\d\d-\d\d|each table says", date.strip()), figure


def test_it_says_what_was_not_tried() -> None:
    assert "Nothing here has run on a Gaudi" in TEXT
    assert "not built where this project is developed" in TEXT


def test_variables_of_a_report_and_verdicts_are_listed() -> None:
    first_hour = section("The first hour")
    assert all(f"`{pattern}`" in first_hour for pattern in REPORTED)
    for verdict in Verdict:
        assert str(verdict) in first_hour or verdict is Verdict.INTERRUPTED
