"""What a sparse method has done since the start: what the host knows of it, and what the device counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode


@dataclass
class SelectionTotals:
    """One count for each sparse request of each step.

    modes: requests by how their choice was made. context_blocks: blocks of their contexts; attended_blocks: those that
    were attended, by choice or in any case. fallbacks: requests that were dense in a step for want of room.
    """

    modes: dict[SelectionMode, int] = field(default_factory=lambda: dict.fromkeys(SelectionMode, 0))
    context_blocks: int = 0
    attended_blocks: int = 0
    fallbacks: int = 0

    def add(self, mode: SelectionMode, context_blocks: int, candidates: int, chosen: int) -> None:
        """One request of a step."""
        self.modes[mode] += 1
        self.context_blocks += context_blocks
        self.attended_blocks += context_blocks - candidates + chosen


class DeviceCounts(NamedTuple):
    """Totals since the start.

    kept, replaced: checks, one for each layer and request. chosen_mass, mass: estimated attention of what was chosen,
    and of all that competed, in the last layer that chooses.
    """

    kept: int
    replaced: int
    chosen_mass: float
    mass: float
