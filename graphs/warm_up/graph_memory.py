"""Predicts the memory of graphs from measured ones, and drops buckets until the others fit a budget."""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array, shape_seconds
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey, GraphKey, graph_name

# A few measurements do not determine all coefficients; the smallest solution is taken.
RIDGE = 1e-3
SWEEPS = 500
CONVERGED = 1e-6


class GraphMemory:
    """Predicts bytes of graphs from measured ones: least squares on simple terms, kept between the measurements.

    The terms of a forward shape are 1, query_len, causal x query_len, shared_blocks, query_len x shared_blocks,
    unique_blocks and selected_blocks: activations grow with rows, attention's bookkeeping with blocks, and every graph
    has a fixed part. No coefficient is negative, so a larger shape never takes less. No prediction is below a measured
    shape that is smaller, nor above a measured one that is larger; if measurements contradict this, the larger figure
    counts.

    Args:
        measured: bytes by graph. For a kind without any (forward, logits), 0 is predicted. Measurements of prompt
            remainders tell nothing about other graphs, whose inputs have other sizes.
    """

    def __init__(self, measured: Mapping[GraphKey, int]) -> None:
        self._forward = _Fit({key: size for key, size in measured.items() if isinstance(key, ForwardShape)})
        self._logits = _Fit({key: size for key, size in measured.items() if isinstance(key, int)})

    def bytes_of(self, key: BucketKey) -> int:
        """Returns the predicted bytes of the graph of `key`; for a measured graph, at least the measured bytes."""
        return (self._forward if isinstance(key, ForwardShape) else self._logits).bytes_of(key)


class _Fit:
    """The prediction for one kind of graph."""

    def __init__(self, measured: Mapping[BucketKey, int]) -> None:
        self._sizes = np.array(list(measured.values()), np.float64)
        if measured:
            self._shapes = np.concatenate([_shape(key) for key in measured])
            terms = np.concatenate([_terms(key) for key in measured])
            self._scale = np.maximum(terms.max(axis=0), 1.0)
            self._coefficients = nonnegative_least_squares(terms / self._scale, self._sizes)
            self._sizes = np.array([self._sizes[(self._shapes <= shape).all(axis=1)].max() for shape in self._shapes])

    def bytes_of(self, key: BucketKey) -> int:
        if not self._sizes.size:
            return 0
        shape = _shape(key)
        fitted = float((_terms(key)[0] / self._scale) @ self._coefficients)
        above = self._sizes[(self._shapes >= shape).all(axis=1)].min(initial=np.inf)
        below = self._sizes[(self._shapes <= shape).all(axis=1)].max(initial=0.0)
        return int(np.ceil(max(below, min(fitted, above))))


def nonnegative_least_squares(terms: Floats, values: Floats) -> Floats:
    """Returns [k] coefficients >= 0 that minimise |terms x - values|^2 + ridge |x|^2, by coordinate descent.

    Args:
        terms: [n, k], each column scaled to at most 1. values: [n].
    """
    gram = terms.T @ terms + RIDGE * np.eye(terms.shape[1])
    target = terms.T @ values
    found = np.zeros(terms.shape[1])
    for _ in range(SWEEPS):
        before = found.copy()
        for index in range(len(found)):
            rest = target[index] - gram[index] @ found + gram[index, index] * found[index]
            found[index] = max(0.0, rest / gram[index, index])
        if np.abs(found - before).max() <= CONVERGED * np.abs(found).max():
            break
    return found


def _shape(key: BucketKey) -> NDArray[np.int64]:
    """Returns [1, d] sizes."""
    return graph_array([key]) if isinstance(key, ForwardShape) else np.array([[key]], np.int64)


def _terms(key: BucketKey) -> Floats:
    """Returns [1, k], the terms in which memory is linear."""
    if not isinstance(key, ForwardShape):
        return np.array([[1.0, key]])
    causal, q, s, u, selected, _ = graph_array([key])[0].astype(np.float64)
    return np.array([[1.0, q, causal * q, s, q * s, u, selected]])


GIB = 2**30
TINY = float(np.finfo(np.float64).tiny)


class MemoryBudgetError(ValueError):
    """Raised if a budget cannot hold the buckets with which serving starts."""


@dataclass(frozen=True)
class FitResult:
    """The buckets that fit."""

    kept: dict[GraphKey, int]
    dropped: dict[BucketKey, str]

    @property
    def size(self) -> int:
        """Bytes of all graphs that are kept."""
        return sum(self.kept.values())


def fit_to_memory(buckets: BucketSet, measured: Mapping[GraphKey, int], budget_bytes: int) -> FitResult:
    """Drops the most wasteful buckets until the others fit.

    A bucket's waste is its memory times its cost over that of the next bucket that could take its steps: memory that
    saves nothing is all waste, memory that saves nine tenths of the time is waste by a tenth.

    Args:
        buckets: all wanted buckets.
        measured: bytes of the warm graphs, including both maxima and those for prompt remainders. They stay.
        budget_bytes: the most bytes of all graphs together.

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
        keys: [n] in ascending order of cost, so that a bucket comes before those that dominate it.
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
        """Returns the largest waste; less than 0 if no graph can be dropped."""
        return float(self._waste.max())

    def drop(self) -> int:
        """Drops the most wasteful bucket and gives its index. Among equals it drops the cheapest."""
        index = int(np.argmax(self._waste))
        self._kept[index] = False
        self._waste[index] = -1.0
        for other in np.flatnonzero((self._rival == index) & (self._waste >= 0)):
            self._weigh(int(other))
        return index

    def rival_of(self, index: int) -> BucketKey:
        """Returns the cheapest kept bucket that can take the steps of a dropped one."""
        return self.keys[self._rival_index(index)]

    def _weigh(self, index: int) -> None:
        rival = self._rival_index(index)
        self._rival[index] = rival
        self._waste[index] = self._sizes[index] * self._seconds[index] / max(self._seconds[rival], TINY)

    def _rival_index(self, index: int) -> int:
        fits = self._kept & (self._shapes >= self._shapes[index]).all(axis=1)
        fits[: index + 1] = False
        return int(np.argmax(fits))
