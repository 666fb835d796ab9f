"""What `ucm.scheduler.admission` may be beside `greedy`: how many blocks requests will need at the time of the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_gaudi_ucm.scheduler.expected_blocks import expected_peak
from vllm_gaudi_ucm.scheduler.future_blocks import Footprint, peak_blocks
from vllm_gaudi_ucm.scheduler.output_lengths import OutputLengths

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.scheduler_config import SchedulerConfig

FIRST_MARGIN = 0.5
LEAST_MARGIN, MOST_MARGIN = 0.0, 3.0
MARGIN_STEP = 0.25


class AdmissionRule(Protocol):
    """A rule of admission."""

    changes: bool
    """Whether its answer for the same requests changes with time."""

    def peak(self, footprints: Sequence[Footprint]) -> float:
        """Blocks of the cache that these requests will need at one time."""

    def ended(self, length: int, others_wait: bool) -> None:
        """An answer has ended by itself with so many tokens. others_wait: the rule lets nobody begin now."""

    def preempted(self) -> None:
        """A request had to give its blocks to others."""


class Exact:
    """Every answer may have all of its `max_tokens`.

    Args:
        block_size: tokens of a block.
        in_step: see `peak_blocks`.
    """

    changes = False

    def __init__(self, block_size: int, *, in_step: bool) -> None:
        self._block_size = block_size
        self._in_step = in_step

    def peak(self, footprints: Sequence[Footprint]) -> float:
        return peak_blocks(footprints, self._block_size, in_step=self._in_step)

    def ended(self, length: int, others_wait: bool) -> None:
        pass

    def preempted(self) -> None:
        pass


class Predicted:
    """Answers are as long as those before them; exact until there was one.

    Args:
        exact: what is never exceeded.
        block_size: tokens of a block.
        options: `preemption_rate` and `least_output`.
    """

    changes = True

    def __init__(self, exact: Exact, block_size: int, options: SchedulerConfig) -> None:
        self._exact = exact
        self._block_size = block_size
        self._least = options.least_output
        self._margin = SafetyMargin(options.preemption_rate)
        self._lengths = OutputLengths()

    def peak(self, footprints: Sequence[Footprint]) -> float:
        most = self._exact.peak(footprints)
        deviations = self._margin.deviations
        return min(most, expected_peak(footprints, self._lengths, self._block_size, deviations, self._least))

    def ended(self, length: int, others_wait: bool) -> None:
        self._lengths.add(length)
        if others_wait:
            self._margin.answered()

    def preempted(self) -> None:
        self._margin.preempted()


class SafetyMargin:
    """Standard deviations that `predicted` keeps beyond what it expects; they follow how often requests are preempted.

    Up by MARGIN_STEP for a preemption, and down by so much less for an answer that between them they stay where
    requests are preempted as often as they may be (stochastic approximation: Robbins and Monro, 1951).

    Args:
        rate: preemptions for each answer.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.deviations = FIRST_MARGIN

    def preempted(self) -> None:
        """A request had to give its blocks to others."""
        self.deviations = min(MOST_MARGIN, self.deviations + MARGIN_STEP)

    def answered(self) -> None:
        """An answer has ended while requests waited for room: without them it says nothing of a smaller margin."""
        self.deviations = max(LEAST_MARGIN, self.deviations - self._rate * MARGIN_STEP)


def make_rule(options: SchedulerConfig, block_size: int, *, in_step: bool) -> AdmissionRule | None:
    """None for `greedy`, which asks nobody. in_step: see `peak_blocks`."""
    if options.admission == "greedy":
        return None
    exact = Exact(block_size, in_step=in_step)
    return exact if options.admission == "exact" else Predicted(exact, block_size, options)
