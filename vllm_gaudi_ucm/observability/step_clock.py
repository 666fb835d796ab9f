"""What the stages of a step take."""

from __future__ import annotations

import time
from itertools import pairwise


class StepClock:
    """Times the three stages of one step on the host's clock, in milliseconds."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def skip(self, seconds: float) -> None:
        """Leaves out `seconds` that are no part of the step's stages."""
        self._marks[-1] += seconds

    def planned(self) -> None:
        self._marks.append(time.perf_counter())

    computed = planned

    def sampled(self, took_part: bool = True) -> None:
        """The end; a division of a step that others followed took no part in sampling."""
        self._marks.append(time.perf_counter() if took_part else self._marks[-1])

    def waited(self, seconds: float) -> None:
        """The host has waited for the step's tokens, after `sampled`."""
        self._marks[-1] += seconds

    @property
    def milliseconds(self) -> tuple[float, float, float]:
        """Of the three stages, in their order."""
        plan, forward, sample = (1e3 * (stop - start) for start, stop in pairwise(self._marks))
        return plan, forward, sample
