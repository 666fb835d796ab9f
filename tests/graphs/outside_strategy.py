"""A bucket strategy as another package would bring it: one file, its option beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.strategies.grid import GridStrategy


@dataclass(frozen=True)
class Powers(GridStrategy):
    """The maximum, and the n - 1 largest powers of a base below it."""

    base: Annotated[int, Ge(2)] = field(default=2, metadata={"description": "Factor between two sizes."})

    def levels(self, cost: Cost, axis: str, maximum: int, n: int) -> list[int]:
        powers = [self.base**power for power in range(31) if self.base**power < maximum]
        return [*powers[len(powers) - n + 1 :], maximum] if n > 1 else [maximum]
