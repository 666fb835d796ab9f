"""Predicts the memory of graphs that were not captured yet from those that were."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import Floats
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array
from vllm_gaudi_ucm.graphs.warm_up.graph_key import BucketKey, GraphKey

# A handful of measurements does not decide as many coefficients; of all that explain them the smallest are taken.
RIDGE = 1e-3
SWEEPS = 500
CONVERGED = 1e-6


class GraphMemory:
    """Bytes of graphs, from the measured ones: least squares on simple terms, kept between what was measured.

    The terms of a forward shape are 1, query_len, causal x query_len, shared_blocks, query_len x shared_blocks,
    unique_blocks and selected_blocks: activations grow with rows, attention's bookkeeping with blocks, and every graph
    has a fixed part. No coefficient is negative, so a larger shape never takes less. No prediction is below a measured
    shape that is smaller, nor above a measured one that is larger; where measurements contradict this, the larger
    figure counts.

    Args:
        measured: bytes by graph. Of a kind without any (forward, logits) everything is predicted to take 0. Those for
            tails tell nothing of others, whose inputs have room for other choices.
    """

    def __init__(self, measured: Mapping[GraphKey, int]) -> None:
        self._forward = _Fit({key: size for key, size in measured.items() if isinstance(key, ForwardShape)})
        self._logits = _Fit({key: size for key, size in measured.items() if isinstance(key, int)})

    def bytes_of(self, key: BucketKey) -> int:
        """Bytes that the graph of `key` takes, predicted; for a measured one at least what was measured."""
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
    """[k] coefficients >= 0 that minimise |terms x - values|^2 + ridge |x|^2, by coordinate descent.

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
    """[1, d] sizes."""
    return graph_array([key]) if isinstance(key, ForwardShape) else np.array([[key]], np.int64)


def _terms(key: BucketKey) -> Floats:
    """[1, k] what memory is linear in."""
    if not isinstance(key, ForwardShape):
        return np.array([[1.0, key]])
    causal, q, s, u, selected, _ = graph_array([key])[0].astype(np.float64)
    return np.array([[1.0, q, causal * q, s, q * s, u, selected]])
