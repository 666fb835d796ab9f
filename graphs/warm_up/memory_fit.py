"""Leaves buckets out until the graphs of the others fit a budget of memory."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array, shape_seconds
from vllm_gaudi_ucm.graphs.warm_up.graph_key import BucketKey, GraphKey, graph_name
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import GraphMemory

GIB = 2**30
TINY = float(np.finfo(np.float64).tiny)


class MemoryBudgetError(ValueError):
    """A budget that cannot hold the buckets with which serving starts."""


@dataclass(frozen=True)
class FitResult:
    """Which buckets fit.

    kept: bytes by graph, measured or predicted. dropped: reasons by graph, in the order in which they were dropped.
    """

    kept: dict[GraphKey, int]
    dropped: dict[BucketKey, str]

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(self.kept.values())


def fit_to_memory(buckets: BucketSet, measured: Mapping[GraphKey, int], budget_bytes: int) -> FitResult:
    """Drops the most wasteful buckets until the others fit.

    A bucket's waste is its memory times its cost over that of the next bucket that could take its steps: memory that
    saves nothing is all waste, memory that saves nine tenths of the time is waste by a tenth.

    Args:
        buckets: all that are wanted.
        measured: bytes of the graphs that are warm, among them both maxima, and those for tails. They stay.
        budget_bytes: what all graphs together may take.

    Raises:
        MemoryBudgetError: the measured graphs alone exceed the budget.
    """
    check_budget(measured.values(), budget_bytes, buckets.limits.max_num_batched_tokens)
    memory = GraphMemory(measured)
    keys: tuple[BucketKey, ...] = (*buckets.forward, *buckets.logits)
    kept: dict[GraphKey, int] = dict(measured)
    kept.update((key, memory.bytes_of(key)) for key in keys if key not in measured)
    shapes, rows = graph_array(buckets.forward), np.array(buckets.logits, np.int64)
    kinds = [
        _Waste(buckets.forward, shapes, shape_seconds(buckets.cost, shapes), kept, measured),
        _Waste(buckets.logits, rows[:, None], np.asarray(buckets.cost.logits_seconds(rows)), kept, measured),
    ]
    dropped: list[tuple[_Waste, int]] = []
    total = sum(kept.values())
    while total > budget_bytes:
        kind = max(kinds, key=lambda kind: kind.most)
        dropped.append((kind, kind.drop()))
        total -= kept[kind.keys[dropped[-1][1]]]
    reasons: dict[BucketKey, str] = {}
    for kind, index in dropped:
        key = kind.keys[index]
        reasons[key] = _reason(kept.pop(key), budget_bytes, kind.rival_of(index))
    return FitResult(kept, reasons)


def _reason(size: int, budget_bytes: int, rival: BucketKey) -> str:
    return (
        f"about {size / GIB:.3f} GiB do not fit ucm.graphs.memory_budget ({budget_bytes / GIB:.2f} GiB); "
        f"its steps run in {graph_name(rival)}"
    )


def check_budget(measured: Collection[int], budget_bytes: int, max_num_batched_tokens: int) -> None:
    """Raises a MemoryBudgetError if the graphs with which serving starts, bytes of each, take more than the budget."""
    needed = sum(measured)
    if needed > budget_bytes:
        raise MemoryBudgetError(
            f"ucm.graphs.memory_budget is {budget_bytes / GIB:.3f} GiB, but the {len(measured)} graphs with which "
            f"serving starts take {needed / GIB:.3f} GiB; raise it, lower --max-num-batched-tokens (now "
            f"{max_num_batched_tokens}), or start with fewer buckets (ucm.graphs.skeleton)"
        )


class _Waste:
    """Waste of the buckets of one kind, kept up to date while buckets are dropped.

    Args:
        keys: [n] in ascending order of cost, so that whatever dominates a bucket comes after it.
        shapes: [n, d]. seconds: [n]. sizes: bytes by graph. stays: graphs that are never dropped.
    """

    def __init__(
        self,
        keys: Sequence[BucketKey],
        shapes: NDArray[np.int64],
        seconds: Floats,
        sizes: Mapping[GraphKey, int],
        stays: Container[GraphKey],
    ) -> None:
        self.keys = keys
        self._shapes, self._seconds = shapes, seconds
        self._sizes = np.array([sizes[key] for key in keys], np.float64)
        self._kept = np.ones(len(keys), bool)
        self._rival = np.full(len(keys), -1)
        self._waste = np.full(len(keys), -1.0)
        for index, key in enumerate(keys[:-1]):
            if key not in stays:
                self._weigh(index)

    @property
    def most(self) -> float:
        """The largest waste; less than 0 where nothing can be dropped."""
        return float(self._waste.max())

    def drop(self) -> int:
        """Drops the most wasteful bucket and gives its index. Of equals the cheapest goes."""
        index = int(np.argmax(self._waste))
        self._kept[index] = False
        self._waste[index] = -1.0
        for other in np.flatnonzero((self._rival == index) & (self._waste >= 0)):
            self._weigh(int(other))
        return index

    def rival_of(self, index: int) -> BucketKey:
        """The cheapest bucket that is kept and can take the steps of one that is not."""
        return self.keys[self._rival_index(index)]

    def _weigh(self, index: int) -> None:
        rival = self._rival_index(index)
        self._rival[index] = rival
        self._waste[index] = self._sizes[index] * self._seconds[index] / max(self._seconds[rival], TINY)

    def _rival_index(self, index: int) -> int:
        fits = self._kept & (self._shapes >= self._shapes[index]).all(axis=1)
        fits[: index + 1] = False
        return int(np.argmax(fits))
