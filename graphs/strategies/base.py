"""The interface of bucket strategies, and the request that they answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from vllm_gaudi_ucm.graphs.cost.step_cost import Cost
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps

Source = Literal["buckets", "trace"]
"""The keys of `ucm.graphs` that name a file for a strategy to work on."""


@dataclass(frozen=True)
class BucketRequest:
    """Limits and cost for every strategy; `path` of the bucket file, `steps` of the trace.

    max_graphs: the most graphs, forward and logits together; None leaves the number to the strategy.
    report: called with the fraction of the work that is done.
    live_blocks: most blocks that a sparse request always attends to; 0: unknown, or there is no sparse method.
    rows_each: most rows of a request that decodes: one plus its drafts.
    """

    limits: Limits
    cost: Cost
    max_graphs: int | None = None
    path: Path | None = None
    steps: Steps | None = None
    report: Callable[[float], None] = lambda done: None
    live_blocks: int = 0
    rows_each: int = 1


@dataclass(frozen=True)
class BucketStrategy(ABC):
    """A way to choose buckets.

    A subclass is a frozen dataclass. Its fields are its options, given under `ucm.graphs.strategy_options`: each has a
    type that pydantic can check, a default, and a description in `field(metadata={"description": ...})`.
    """

    needs: ClassVar[Source | None] = None
    """The file that the strategy needs; None if it needs only the limits."""

    @abstractmethod
    def choose(self, request: BucketRequest) -> BucketSet:
        """The buckets, at most `request.max_graphs` graphs. Raises ValueError if the request lacks something."""

    def least_graphs(self, request: BucketRequest) -> int:
        """Returns the `max_graphs` below which some phases have no bucket of their own; 0 if there is no such bound."""
        return 0
