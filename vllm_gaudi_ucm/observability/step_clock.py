"""Times the stages of a step."""

import time
from itertools import pairwise


class StepClock:
    """Times the three stages of one step on the host's clock, in milliseconds."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def skip(self, seconds: float) -> None:
        self._marks[-1] += seconds

    def planned(self) -> None:
        self._marks.append(time.perf_counter())

    computed = planned

    def sampled(self, took_part: bool = True) -> None:
        """Marks the end of sampling; a part of a divided step that others followed did not sample."""
        self._marks.append(time.perf_counter() if took_part else self._marks[-1])

    def waited(self, seconds: float) -> None:
        """The host has waited for the step's tokens, after `sampled`."""
        self._marks[-1] += seconds

    @property
    def milliseconds(self) -> tuple[float, float, float]:
        """Returns the milliseconds of the three stages, in their order."""
        plan, forward, sample = (1e3 * (stop - start) for start, stop in pairwise(self._marks))
        return plan, forward, sample
