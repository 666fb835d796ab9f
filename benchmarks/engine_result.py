"""The measurements of one row of the whole-engine table, and their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass
class Row:
    """Seconds of each repetition by side; `tokens` is None for start-up, which compares seconds directly."""

    name: str
    tokens: int | None
    goal: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds of each repetition, including prompts even if the clock does not count them."""

    def add(self, side: str, seconds: float, outputs: list[list[int]] | None = None) -> None:
        """Record one repetition."""
        self.seconds.setdefault(side, []).append(seconds)
        if outputs is not None:
            self.outputs.setdefault(side, []).append(outputs)

    def figure(self, side: str) -> float | None:
        """Median tokens/s of a side (seconds for start-up), or None when it was not measured."""
        if not self.seconds.get(side):
            return None
        seconds = median(self.seconds[side])
        return seconds if self.tokens is None else self.tokens / seconds

    def ratio(self, side: str, peer: str) -> float | None:
        """Returns how many times faster `side` is than `peer`."""
        if not self.seconds.get(side) or not self.seconds.get(peer):
            return None
        return median(self.seconds[peer]) / median(self.seconds[side])

    def cpu_ratio(self, side: str, peer: str) -> float | None:
        """Returns how many times less CPU time `side` takes than `peer`."""
        if not self.cpu.get(side) or not self.cpu.get(peer):
            return None
        return median(self.cpu[peer]) / max(1e-3, median(self.cpu[side]))

    def agreement(self, side: str, peer: str) -> float | None:
        """Fraction of the output tokens, up to the first that differs in each request, that both sides share."""
        pairs = [
            (ours, theirs)
            for mine, other in zip(self.outputs.get(side, []), self.outputs.get(peer, []), strict=False)
            for ours, theirs in zip(mine, other, strict=True)
        ]
        tokens = sum(len(ours) for ours, _ in pairs)
        return sum(_common_prefix(*pair) for pair in pairs) / tokens if tokens else None

    def to_json(self, side: str, peer: str) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "name": self.name,
            "unit": "s" if self.tokens is None else "tokens/s",
            "figures": {name: self.figure(name) for name in self.seconds},
            "seconds": self.seconds,
            "cpu_seconds": self.cpu,
            "ratio": self.ratio(side, peer),
            "goal": self.goal,
            "agreement": self.agreement(side, peer),
        }


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return min(len(ours), len(theirs))
