"""What became of every graph: the record that the last table of a warm-up shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_gaudi_ucm.graphs.warm_up.graph_key import GraphKey


class GraphState(StrEnum):
    """`dropped`: left out on purpose, e.g. for memory; `failed`: an error while it was warmed."""

    COLD = "cold"
    WARM = "warm"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True)
class GraphRecord:
    """One graph: what its warm-up took, and why it is not warm if it is not.

    seconds: of its warm-up, also where that failed. size: bytes of device memory that it took.
    """

    key: GraphKey
    state: GraphState
    seconds: float = 0.0
    size: int = 0
    reason: str = ""


@dataclass(frozen=True)
class WarmUpSummary:
    """All graphs: forward shapes, those for tails, and logits rows, each in ascending order of cost.

    skeleton_graphs: those with which serving started. skeleton_seconds: what they took.
    seconds: spent on all graphs, the skeleton included.
    """

    records: tuple[GraphRecord, ...]
    skeleton_graphs: int
    skeleton_seconds: float

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.records)

    @property
    def size(self) -> int:
        """Bytes of all warm graphs."""
        return sum(record.size for record in self.records)

    def count(self, state: GraphState) -> int:
        return sum(record.state is state for record in self.records)
