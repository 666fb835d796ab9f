"""What `ucm.scheduler.admission` may be beside `greedy`: how many blocks requests will need at the time of the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_gaudi_ucm.scheduler.expected_blocks import expected_peak
from vllm_gaudi_ucm.scheduler.future_blocks import Footprint, peak_blocks
from vllm_gaudi_ucm.scheduler.output_lengths import FEWEST_SEEN, OutputLengths

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.scheduler_config import SchedulerConfig


class AdmissionRule(Protocol):
    """A rule of admission."""

    changes: bool
    """Whether its answer for the same requests changes with time."""

    def peak(self, footprints: Sequence[Footprint]) -> float:
        """Blocks of the cache that these requests will need at one time."""

    def ended(self, length: int) -> None:
        """An answer has ended by itself with so many tokens."""


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

    def ended(self, length: int) -> None:
        pass


class Predicted:
    """Answers are as long as those before them; exact until there were enough.

    Args:
        exact: what is never exceeded.
        block_size: tokens of a block.
        options: `confidence` and `least_output`.
    """

    changes = True

    def __init__(self, exact: Exact, block_size: int, options: SchedulerConfig) -> None:
        self._exact = exact
        self._block_size = block_size
        self._options = options
        self._lengths = OutputLengths()

    def peak(self, footprints: Sequence[Footprint]) -> float:
        most = self._exact.peak(footprints)
        if len(self._lengths) < FEWEST_SEEN:
            return most
        options = self._options
        expected = expected_peak(footprints, self._lengths, self._block_size, options.confidence, options.least_output)
        return min(most, expected)

    def ended(self, length: int) -> None:
        self._lengths.add(length)


def make_rule(options: SchedulerConfig, block_size: int, *, in_step: bool) -> AdmissionRule | None:
    """None for `greedy`, which asks nobody. in_step: see `peak_blocks`."""
    if options.admission == "greedy":
        return None
    exact = Exact(block_size, in_step=in_step)
    return exact if options.admission == "exact" else Predicted(exact, block_size, options)
