"""Non-negative least squares: the active-set method of Lawson and Hanson, Solving Least Squares Problems (1974)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def non_negative_least_squares(matrix: Numbers, target: Numbers) -> Numbers:
    """float64 [columns] >= 0 that brings matrix @ result closest to target, in the sum of squares.

    matrix: float64 [lines, columns]; a column of zeros gets 0. target: float64 [lines].
    """
    scale = np.linalg.norm(matrix, axis=0)
    columns = matrix / np.where(scale > 0, scale, 1.0)
    result = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(3 * matrix.shape[1]):
        gain = columns.T @ (target - columns @ result)
        gain[free] = 0.0
        best = int(gain.argmax())
        if gain[best] <= tolerance:
            break
        free[best] = True
        result = _solve_free(columns, target, result, free)
    return result / np.where(scale > 0, scale, 1.0)


def _solve_free(columns: Numbers, target: Numbers, result: Numbers, free: NDArray[np.bool_]) -> Numbers:
    """The least squares over the free columns; those that would become negative stop being free, which it changes."""
    while True:
        wanted = np.zeros_like(result)
        wanted[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        bad = free & (wanted <= 0)
        if not bad.any():
            return wanted
        step = float((result[bad] / (result[bad] - wanted[bad] + 1e-300)).min())
        result = result + step * (wanted - result)
        free &= result > 1e-15
        free[bad & (result <= 1e-15)] = False
        result[~free] = 0.0
