"""The outcome of a seed: one line on a terminal, one object in JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import msgspec


class Outcome(msgspec.Struct):
    """Made by the process of a seed.

    Args:
        seed: its number.
        setting: the engine, in words.
        problems: what is wrong; none if the seed passed.
        refused_engines: draws before it that were refused by name, each with the refusal.
        refused_requests: requests that were refused by name.
        steps, tokens, requests, aborts, preemptions: how much was served.
        seconds: what it took.
    """

    seed: int
    setting: str = ""
    problems: list[str] = msgspec.field(default_factory=list)
    refused_engines: list[str] = msgspec.field(default_factory=list)
    refused_requests: list[str] = msgspec.field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    requests: int = 0
    aborts: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True without problems."""
        return not self.problems

    def line(self) -> str:
        """The seed in one line."""
        word = "ok  " if self.passed else "FAIL"
        counts = f"{self.steps} steps, {self.requests} requests, {self.tokens} tokens"
        more = [f"{self.aborts} aborted"] * bool(self.aborts) + [f"{self.preemptions} preempted"] * bool(
            self.preemptions
        )
        return f"{word} {self.seed}: {self.setting} | {', '.join([counts, *more])} | {self.seconds:.1f} s"

    def report(self, pins: Mapping[str, str]) -> list[str]:
        """Lines about a seed that failed: what differed, and the command that repeats it."""
        return [f"     {problem}" for problem in self.problems] + [f"     repeat: {repeat(self.seed, pins)}"]


def repeat(seed: int, pins: Mapping[str, str]) -> str:
    """The command that runs a seed again."""
    given = " ".join(f"--pin {name}={value}" for name, value in pins.items())
    return f"make fuzz SEEDS={seed}" + (f" ARGS={shlex.quote(given)}" if given else "")
