"""Traffic of a server: requests with their lengths, and the steps that an engine makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Request(NamedTuple):
    """A request of a log.

    arrival: seconds since the first one. prompt, output: tokens.
    hashes: ids of equal parts of the prompt, each with all before it; parts of `unit` tokens are shared by requests
        with the same ids.
    """

    arrival: float
    prompt: int
    output: int
    hashes: tuple[int, ...] = ()
    unit: int = 0


class Prefill(NamedTuple):
    """A prompt's part of a step. query: tokens that the step computes. computed: tokens before them, in the cache."""

    query: int
    computed: int


class Step(NamedTuple):
    """A step of one engine.

    prefills: in the order of the batch. decodes: requests. blocks: of all decodes, shared ones once for each request.
    highest: the highest block id of a decode plus 1; 0 if the log does not say it.
    tokens: of each decode, more than 1 with drafts.
    """

    prefills: tuple[Prefill, ...]
    decodes: int
    blocks: int
    highest: int = 0
    tokens: int = 1


@dataclass(frozen=True)
class Traffic:
    """Steps to choose buckets for.

    source: what they come from, for people. steps: for each step one of every rank.
    assumptions: what was estimated, as sentences. known: limits of the server that the log names.
    """

    source: str
    steps: Sequence[tuple[Step, ...]]
    assumptions: tuple[str, ...] = ()
    known: dict[str, int] = field(default_factory=dict)

    def part(self, first: int, end: int | None = None) -> Traffic:
        """Returns the traffic of some steps."""
        return Traffic(self.source, self.steps[first:end], self.assumptions, self.known)


class TrafficError(ValueError):
    """A log that is of another kind, or that says something impossible."""
