"""A list of blocks that attention reads and that a choice may write to directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SelectedList:
    """The list of a step; the layers of the step use it one after the other.

    blocks: int64 [entries] physical blocks, including those of other parts.
    places: int64 [selected] indices of the chosen blocks; each at most once.
    holds: the chosen blocks that are in the list, int64 [selected]; None if unknown. Attention copies any other blocks
        into it.
    """

    blocks: Tensor
    places: Tensor
    holds: Tensor | None = None

    def written(self, chosen: Tensor | None) -> None:
        """Records that these blocks are now in the list; None: others, which their owner may change."""
        self.holds = chosen
