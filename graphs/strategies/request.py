"""What a strategy is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps


@dataclass(frozen=True)
class BucketRequest:
    """Limits and cost for every strategy; `path` for `file`, `steps` for `trace`.

    max_graphs: the most graphs, forward and logits together; None leaves it to the strategy.
    report: called with the fraction that is done.
    """

    limits: Limits
    cost: Cost
    max_graphs: int | None = None
    path: Path | None = None
    steps: Steps | None = None
    report: Callable[[float], None] = lambda done: None
