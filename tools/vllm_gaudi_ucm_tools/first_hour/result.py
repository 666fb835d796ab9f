"""The result of a probe: its claims, answers and measurements, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_gaudi_ucm_tools.first_hour.probe import Unit

Event = Mapping[str, Any]
"""One line of a process: `kind` is claim, answer, measure, series, note or end."""

MOST_FOUND = 600  # characters of a cell


class Verdict(StrEnum):
    """The verdict in a row of the report."""

    AS_EXPECTED = "as expected"
    DIFFERS = "differs"
    ANSWERED = "answered"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    DOES_NOT_APPLY = "does not apply here"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    status: its exit status, negative for a signal; None if it was ended by the time limit or by a user.
    events: its findings until then. log: the end of its output. seconds: how long it ran.
    """

    status: int | None
    events: Sequence[Event]
    log: str
    seconds: float
    interrupted: bool = False


@dataclass(frozen=True)
class Result:
    """A row of the report. found: for a person. data: claims, answers, measurements, series, and the end of the log."""

    number: int
    title: str
    mode: str
    case: str
    expected: str
    found: str
    verdict: Verdict
    seconds: float
    data: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "verdict": str(self.verdict), "seconds": round(self.seconds, 3)}


def without_process(unit: Unit, verdict: Verdict, found: str) -> Result:
    """The row of a unit that needs no process."""
    probe = unit.probe
    mode = "" if verdict is Verdict.DOES_NOT_APPLY else unit.mode
    return Result(probe.number, probe.title, mode, unit.case, probe.expectation, found, verdict, 0.0, {})


def judge(unit: Unit, ending: Ending) -> Result:
    """The row of a unit whose process has ended, in whatever way."""
    end = next((event for event in ending.events if event["kind"] == "end"), None)
    verdict, found = _verdict(ending, end)
    data = {
        kind: [
            {key: value for key, value in event.items() if key != "kind"} for event in ending.events if _is(event, kind)
        ]
        for kind in ("claim", "answer", "measure", "series", "note")
    }
    data_and_log = {**data, "exit_status": ending.status, "log": ending.log}
    probe = unit.probe
    return Result(
        probe.number,
        probe.title,
        unit.mode,
        unit.case,
        probe.expectation,
        found[:MOST_FOUND],
        verdict,
        ending.seconds,
        data_and_log,
    )


def _is(event: Event, kind: str) -> bool:
    return bool(event["kind"] == kind)


def _verdict(ending: Ending, end: Event | None) -> tuple[Verdict, str]:
    wrong = [f"{event['name']}: {event['found']}, expected {event['expected']}" for event in _wrong(ending.events)]
    said = "; ".join((*wrong, *_said(ending.events)))
    if ending.interrupted:
        return Verdict.INTERRUPTED, "; ".join(filter(None, ("ended by a person", said)))
    if ending.status is None:
        return Verdict.TIMED_OUT, "; ".join(filter(None, (f"ended after {ending.seconds:.0f} s", said)))
    if end is None:
        return Verdict.FAILED, "; ".join(filter(None, (how_it_died(ending.status), said)))
    if end["status"] == "does not apply":
        return Verdict.DOES_NOT_APPLY, str(end["text"])
    if end["status"] == "refused":
        return Verdict.AS_EXPECTED, f"refused, as expected: {end['text']}"
    if end["status"] == "error":
        return Verdict.FAILED, "; ".join(filter(None, (str(end["text"]), said)))
    if wrong:
        return Verdict.DIFFERS, said
    answered = any(event["kind"] == "answer" for event in ending.events)
    return (Verdict.ANSWERED if answered else Verdict.AS_EXPECTED), said or "nothing to report"


def _wrong(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == "claim" and not event["ok"]]


def _said(events: Sequence[Event]) -> list[str]:
    """Answers first, then claims that hold, then figures."""
    answers = [f"{event['name']}: {event['text']}" for event in events if event["kind"] == "answer"]
    held = [f"{event['name']}: {event['found']}" for event in events if event["kind"] == "claim" and event["ok"]]
    figures = [
        f"{event['name']}: {event['value']:.4g} {event['unit']}".rstrip()
        for event in events
        if event["kind"] == "measure"
    ]
    return [*answers, *held, *figures]


def how_it_died(status: int) -> str:
    """Describes a process that ended without a final report."""
    import signal

    if status >= 0:
        return f"the process ended with status {status} before it had finished"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    why = " (out of memory, or ended from outside)" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{why}"
