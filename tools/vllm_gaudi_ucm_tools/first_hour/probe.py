"""A probe: one question to a device, and how it is asked. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Mode = Literal["stock", "eager", "compile", "lazy"]
"""How operators run. `stock`: PT_HPU_LAZY_MODE is not set; `lazy` exists only on Gaudi."""

DEVICES = ("hpu", "cuda", "cpu")
MODES: tuple[Mode, ...] = get_args(Mode)
EAGER_AND_COMPILED: tuple[Mode, ...] = ("eager", "compile")
ALL_MODES: tuple[Mode, ...] = ("eager", "compile", "lazy")


@dataclass(frozen=True)
class Probe:
    """A probe: its question, the known part of the answer, and where it applies.

    expected: the known part, as text.
    function: `module:function` in `first_hour/probes`.
    modes: each is a process of its own, as is each of the `cases`, so that a crash in one leaves the others.
    devices: devices on which the question has a meaning.
    questions: numbers of the open questions (`QUESTIONS` of the catalogue) that it answers.
    limit_s: seconds after which a process is ended.
    falls_back: operators outside the compiled graph are the subject of the probe, not an error.
    """

    number: int
    title: str
    expected: str
    function: str
    modes: tuple[Mode, ...] = EAGER_AND_COMPILED
    devices: tuple[str, ...] = DEVICES
    questions: tuple[int, ...] = ()
    cases: tuple[str, ...] = ("",)
    limit_s: int = 180
    falls_back: bool = False

    @property
    def expectation(self) -> str:
        """Returns the known part, and the open questions."""
        if not self.questions:
            return self.expected
        numbers = ", ".join(map(str, self.questions))
        open_ones = f"unknown: question{'s' if len(self.questions) > 1 else ''} {numbers}"
        return f"{self.expected}; {open_ones}" if self.expected else open_ones


class Unit(NamedTuple):
    """A process: a probe in one mode, with one of its cases."""

    probe: Probe
    mode: Mode
    case: str = ""

    @property
    def name(self) -> str:
        """Such as `11 compile gather -1`."""
        return " ".join(filter(None, (str(self.probe.number), self.mode, self.case)))


def units(probes: Collection[Probe], device: str, modes: Collection[Mode]) -> Iterator[Unit]:
    """Returns the processes of these probes on a device; one unit stands for a probe that does not apply there."""
    for probe in probes:
        if device not in probe.devices:
            yield Unit(probe, probe.modes[0])
            continue
        for mode in probe.modes:
            if mode in modes and not (mode == "lazy" and device != "hpu"):
                yield from (Unit(probe, mode, case) for case in probe.cases)
