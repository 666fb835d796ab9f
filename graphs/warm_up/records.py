"""Records of a warm-up: duration and memory of each graph, and what is left to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape

BucketKey = ForwardShape | int
"""The key of a graph: a forward shape, or the rows of logits and sampling."""
GraphKey = BucketKey | RemainderShape


def graph_name(key: GraphKey) -> str:
    """Returns the key in words, for a log or an error."""
    if isinstance(key, RemainderShape):
        return f"prompt remainder {' '.join(map(str, key.forward.to_list()))}"
    if isinstance(key, ForwardShape):
        return f"bucket {' '.join(map(str, key.to_list()))}"
    return f"{key} logits row{'s' if key != 1 else ''}"


class GraphState(StrEnum):
    """`dropped`: left out on purpose, e.g. for memory; `failed`: an error while it was warmed."""

    COLD = "cold"
    WARM = "warm"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True)
class GraphRecord:
    """One graph: its warm-up, and why it is not warm if it is not.

    seconds: duration of its warm-up, even if that failed. size: bytes of device memory that it took.
    """

    key: GraphKey
    state: GraphState
    seconds: float = 0.0
    size: int = 0
    reason: str = ""


@dataclass(frozen=True)
class WarmUpSummary:
    """All graphs: forward shapes, those for prompt remainders, and logits rows, each in ascending order of cost.

    skeleton_graphs: number of graphs that were warm when serving started. skeleton_seconds: duration of their warm-up.
        seconds: time spent on all graphs, including the skeleton.
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


WarmUpStage = Literal["skeleton", "rest"]


@dataclass(frozen=True)
class WarmUpProgress:
    """One report.

    stage: the skeleton, which is warm before serving starts, or the rest.
    done, total: graphs of the stage that are settled (warm, dropped or failed), and all of them.
    current: the graph that starts now, or None if one has ended.
    ended: the record of the graph that has just ended or been dropped, or None if one starts.
    seconds: time spent on graphs so far, including the skeleton.
    seconds_left: expected time for the remaining graphs of the stage, from those before them; None without any.
    free_memory: bytes that are free on the device.
    """

    stage: WarmUpStage
    done: int
    total: int
    current: GraphKey | None
    ended: GraphRecord | None
    seconds: float
    seconds_left: float | None
    free_memory: int


class WarmUpRecords:
    """One record per graph that became warm, was dropped or failed.

    Args:
        keys: every graph.
    """

    def __init__(self, keys: Sequence[GraphKey]) -> None:
        self._keys = tuple(keys)
        self._records: dict[GraphKey, GraphRecord] = {}
        self._skeleton: frozenset[GraphKey] = frozenset()
        self._skeleton_seconds = 0.0

    def begin_skeleton(self, keys: Collection[GraphKey]) -> None:
        """Declares which graphs belong to the stage `skeleton`; all others are the rest."""
        self._skeleton = frozenset(keys)

    def skeleton_is_warm(self, seconds: float) -> None:
        """Ends the stage `skeleton`, and records its duration."""
        self._skeleton_seconds = seconds

    def add(self, record: GraphRecord) -> None:
        self._records[record.key] = record

    def measured(self) -> dict[GraphKey, int]:
        """Bytes of the warm graphs."""
        return {record.key: record.size for record in self._warm()}

    def last_seconds(self, like: GraphKey) -> float:
        """The seconds of the last warm graph of the same kind (forward, prompt remainder or logits); 0 without any."""
        durations = self._durations(like)
        return durations[-1] if durations else 0.0

    def progress(
        self, stage: WarmUpStage, free_memory: int, current: GraphKey | None, ended: GraphRecord | None
    ) -> WarmUpProgress:
        """Returns the state of `stage` as a report."""
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
        """Returns every graph; a graph without a record is cold."""
        cold = (GraphRecord(key, GraphState.COLD) for key in self._keys)
        records = tuple(self._records.get(record.key, record) for record in cold)
        return WarmUpSummary(records, len(self._skeleton), self._skeleton_seconds)

    def _seconds_of(self, keys: Sequence[GraphKey]) -> float | None:
        """The mean of its kind for each graph, or of all graphs for a kind without measurements; None without any."""
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
