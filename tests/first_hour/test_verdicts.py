"""A row follows from what a process said and how it ended."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER
from vllm_gaudi_ucm_tools.first_hour.probe import Unit
from vllm_gaudi_ucm_tools.first_hour.result import Ending, Event, Verdict, how_it_died, judge

UNIT = Unit(BY_NUMBER[4], "compile")
DONE: Event = {"kind": "end", "status": "done", "text": ""}
RIGHT: Event = {"kind": "claim", "name": "a", "found": "1", "expected": "1", "ok": True}
WRONG: Event = {"kind": "claim", "name": "b", "found": "2", "expected": "3", "ok": False}
ANSWER: Event = {"kind": "answer", "name": "c", "text": "seven"}
MEASURE: Event = {"kind": "measure", "name": "d", "value": 12.345678, "unit": "us"}


@pytest.mark.parametrize(
    ("events", "status", "verdict", "found"),
    [
        ([RIGHT, DONE], 0, Verdict.AS_EXPECTED, "a: 1"),
        ([RIGHT, ANSWER, MEASURE, DONE], 0, Verdict.ANSWERED, "c: seven; a: 1; d: 12.35 us"),
        ([RIGHT, WRONG, ANSWER, DONE], 0, Verdict.DIFFERS, "b: 2, expected 3; c: seven; a: 1"),
        ([RIGHT], -11, Verdict.FAILED, "the process was ended by SIGSEGV; a: 1"),
        ([WRONG], -9, Verdict.FAILED, "the process was ended by SIGKILL (out of memory, or ended from outside)"),
        ([], 3, Verdict.FAILED, "the process ended with status 3 before it had finished"),
        ([RIGHT], None, Verdict.TIMED_OUT, "ended after 5 s; a: 1"),
        ([{"kind": "end", "status": "error", "text": "E: x"}], 0, Verdict.FAILED, "E: x"),
        ([{"kind": "end", "status": "refused", "text": "no"}], 0, Verdict.AS_EXPECTED, "refused, as expected: no"),
        ([{"kind": "end", "status": "does not apply", "text": "1 card"}], 0, Verdict.DOES_NOT_APPLY, "1 card"),
    ],
)
def test_verdict(events: list[Event], status: int | None, verdict: Verdict, found: str) -> None:
    result = judge(UNIT, Ending(status, events, "the log", 5.0))
    assert result.verdict is verdict
    assert result.found.startswith(found)
    assert result.data["log"] == "the log"
    assert result.data["exit_status"] == status


def test_what_was_said_before_the_end_is_kept() -> None:
    result = judge(UNIT, Ending(None, [RIGHT, MEASURE], "", 2.0, interrupted=True))
    assert result.verdict is Verdict.INTERRUPTED
    assert [one["name"] for one in result.data["claim"]] == ["a"]
    assert result.to_json()["data"]["measure"][0]["value"] == 12.345678


def test_a_signal_without_a_name() -> None:
    assert how_it_died(-63) == "the process was ended by signal 63"
