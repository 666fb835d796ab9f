"""Random draws of a seed: each name has a stream of its own, so that a new option changes no other draw."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

ValueT = TypeVar("ValueT")


class UnknownPinError(ValueError):
    """A pin has an unknown name, or a value that is not among its options."""


class Draws:
    """Draws by name.

    Args:
        seed: decides every draw.
        attempt: counts the draws of this seed that the engine refused.
        pins: name -> text of the value to take instead of a draw.
    """

    def __init__(self, seed: int, attempt: int = 0, pins: Mapping[str, str] | None = None) -> None:
        self.seed = seed
        self._attempt = attempt
        self._pins = dict(pins or {})
        self._unused = set(self._pins)

    def stream(self, name: str) -> random.Random:
        """A generator that depends on seed, attempt and name alone."""
        return random.Random(f"{self.seed}/{self._attempt}/{name}")

    def choose(self, name: str, options: Sequence[ValueT], weights: Sequence[float] | None = None) -> ValueT:
        """One of the options, or the pinned one. Raises UnknownPinError for a pin that is no option."""
        if name in self._pins:
            return self._pinned(name, options)
        return self.stream(name).choices(list(options), weights)[0]

    def chance(self, name: str, probability: float) -> bool:
        """True with this probability."""
        return self.choose(name, (True, False), (probability, 1 - probability))

    def number(self, name: str, low: int, high: int) -> int:
        """An integer of both bounds or between them."""
        return self.choose(name, range(low, high + 1))

    def check_pins(self) -> None:
        """Raises UnknownPinError if a pin was never asked for."""
        if self._unused:
            raise UnknownPinError(f"--pin {', '.join(sorted(self._unused))}: no such draw in seed {self.seed}")

    def _pinned(self, name: str, options: Sequence[ValueT]) -> ValueT:
        self._unused.discard(name)
        by_text = {str(option).lower(): option for option in options}
        text = self._pins[name].lower()
        if text not in by_text:
            known = f"{options[0]} to {options[-1]}" if isinstance(options, range) else ", ".join(map(str, options))
            raise UnknownPinError(f"--pin {name}={self._pins[name]}: expected one of {known}")
        return by_text[text]
