"""The list of blocks that attention reads, where a choice may write to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SelectedList:
    """Of a step; the layers of the step use it one after the other.

    blocks: int64 [entries] physical blocks, those of other parts among them.
    places: int64 [selected] where the chosen blocks stand; each at most once.
    holds: the chosen blocks that are there, int64 [selected]; None: nobody has said. Attention to others copies them.
    """

    blocks: Tensor
    places: Tensor
    holds: Tensor | None = None

    def written(self, chosen: Tensor | None) -> None:
        """These are there from now on; None: others, which their owner may change."""
        self.holds = chosen
