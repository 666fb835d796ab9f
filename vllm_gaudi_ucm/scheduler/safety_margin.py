"""How much room `ucm.scheduler.admission` `predicted` keeps beyond what it expects."""

from __future__ import annotations

FIRST = 0.5
LEAST, MOST = 0.0, 3.0
STEP = 0.25


class SafetyMargin:
    """Standard deviations, which follow how often requests are preempted.

    Up by STEP for a preemption, and down by so much less for an answer that between them they stay where requests are
    preempted as often as they may be (stochastic approximation: Robbins and Monro, 1951).

    Args:
        rate: preemptions for each answer.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.deviations = FIRST

    def preempted(self) -> None:
        """A request had to give its blocks to others."""
        self.deviations = min(MOST, self.deviations + STEP)

    def answered(self) -> None:
        """An answer has ended while requests waited for room: without them it says nothing of a smaller margin."""
        self.deviations = max(LEAST, self.deviations - self._rate * STEP)
