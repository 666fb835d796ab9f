"""Pearson's test of counts against a distribution, with a bound that is derived and not tuned."""

from __future__ import annotations

import math

import torch

# natural logarithm of the odds of a false alarm: 1 in a million
_LOG_ODDS = math.log(1e6)


def assert_distributed(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Checks counts of draws [values] against the probability of each value [values].

    For k degrees of freedom, chi-square exceeds k + 2 sqrt(k x) + 2 x with probability exp(-x) at most (Laurent and
    Massart, 2000, lemma 1). Values expected fewer than 5 times are counted together.
    """
    counts, expected = counts.double(), probabilities.double() * counts.sum()
    assert (counts[expected == 0] == 0).all(), "values that are impossible"
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    found = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    bound = freedom + 2 * math.sqrt(freedom * _LOG_ODDS) + 2 * _LOG_ODDS
    assert found <= bound, (found, bound, counts, expected)
