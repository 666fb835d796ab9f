"""What is known of the graphs that a warm-up has dealt with: durations, memory, and how much is left."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_gaudi_ucm.graphs.warm_up.graph_key import GraphKey
from vllm_gaudi_ucm.graphs.warm_up.progress import Stage, WarmUpProgress
from vllm_gaudi_ucm.graphs.warm_up.summary import GraphRecord, GraphState, WarmUpSummary


class WarmUpRecords:
    """One record per graph that became warm, was dropped or failed.

    Args:
        keys: every graph.
    """

    def __init__(self, keys: Sequence[GraphKey]) -> None:
        self._keys = tuple(keys)
        self._records: dict[GraphKey, GraphRecord] = {}
        self._skeleton: frozenset[GraphKey] = frozenset()
        self.skeleton_seconds = 0.0

    def begin_skeleton(self, keys: Collection[GraphKey]) -> None:
        """Says which graphs belong to the stage `skeleton`; all others are the rest."""
        self._skeleton = frozenset(keys)

    def add(self, record: GraphRecord) -> None:
        self._records[record.key] = record

    def measured(self) -> dict[GraphKey, int]:
        """Bytes of the warm graphs."""
        return {record.key: record.size for record in self._warm()}

    def last_seconds(self, like: GraphKey) -> float:
        """What the last warm graph of the same kind took (forward, tail or logits); 0 without any."""
        durations = self._durations(like)
        return durations[-1] if durations else 0.0

    def progress(
        self, stage: Stage, free_memory: int, current: GraphKey | None, ended: GraphRecord | None
    ) -> WarmUpProgress:
        """The state of `stage` as a report."""
        keys = [key for key in self._keys if (key in self._skeleton) == (stage == "skeleton")]
        left = [key for key in keys if key not in self._records]
        return WarmUpProgress(
            stage=stage,
            done=len(keys) - len(left),
            total=len(keys),
            current=current,
            ended=ended,
            seconds=sum(record.seconds for record in self._records.values()),
            seconds_left=self._seconds_of(left),
            free_memory=free_memory,
        )

    def summary(self) -> WarmUpSummary:
        """Every graph; those without a record are cold."""
        cold = (GraphRecord(key, GraphState.COLD) for key in self._keys)
        records = tuple(self._records.get(record.key, record) for record in cold)
        return WarmUpSummary(records, len(self._skeleton), self.skeleton_seconds)

    def _seconds_of(self, keys: Sequence[GraphKey]) -> float | None:
        """As many times the mean of their kind; what was never measured counts as any. None: nothing was."""
        everything = [record.seconds for record in self._warm()]
        if not everything:
            return None
        return sum(_mean(self._durations(key) or everything) for key in keys)

    def _durations(self, like: GraphKey) -> list[float]:
        return [record.seconds for record in self._warm() if type(record.key) is type(like)]

    def _warm(self) -> list[GraphRecord]:
        return [record for record in self._records.values() if record.state is GraphState.WARM]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
