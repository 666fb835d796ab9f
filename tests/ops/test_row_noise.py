"""Noise of rows: vLLM's hash, the right distribution, and nothing in it but the row's seed and position."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_gaudi_ucm.ops.row_noise.api import (
    DOUBLE_DOMAIN,
    exponential_noise,
    exponential_noise_double,
    row_keys,
    token_mixes,
)

WORDS = (1 << 32) - 1


def murmur3(seed: int, position: int, token: int, domain: int = 0) -> int:
    """The hash of vLLM's `murmur3_hash32`, in Python's integers."""

    def mix(found: int, key: int) -> int:
        key = key * 0xCC9E2D51 & WORDS
        key = (key << 15 | key >> 17) & WORDS
        found ^= key * 0x1B873593 & WORDS
        found = (found << 13 | found >> 19) & WORDS
        return (found * 5 + 0xE6546B64) & WORDS

    found = domain
    for word in (seed & WORDS, seed >> 32 & WORDS, position, token):
        found = mix(found, word)
    found ^= 16
    found = (found ^ found >> 16) * 0x85EBCA6B & WORDS
    found = (found ^ found >> 13) * 0xC2B2AE35 & WORDS
    return found ^ found >> 16


def noise(seeds: list[int], positions: list[int], vocab_size: int) -> Tensor:
    keys = row_keys(np.array(seeds, np.int64), np.array(positions, np.int64))
    return exponential_noise(torch.from_numpy(keys), torch.from_numpy(token_mixes(vocab_size)))


@settings(max_examples=50)
@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20), st.integers(1, 200))
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int, vocab_size: int) -> None:
    """Of vLLM's hash, in float32 and in float64, whatever rows are beside it."""
    seeds, positions = np.array([5, seed], np.int64), np.array([position, position], np.int64)
    mixes = torch.from_numpy(token_mixes(vocab_size))
    keys, more = (torch.from_numpy(row_keys(seeds, positions, domain)) for domain in (0, DOUBLE_DOMAIN))
    found, double = exponential_noise(keys, mixes)[1], exponential_noise_double(keys, more, mixes)[1]
    for token in (0, vocab_size - 1):
        low = murmur3(seed, position, token)
        high = murmur3(seed, position, token, DOUBLE_DOMAIN)
        uniform = min((low + 0.5) / 2**32, 1 - 2**-24)
        wanted = -math.log1p(-uniform)
        # uniform is rounded once, to half a unit of its last place; the slope of the logarithm is 1 / (1 - uniform),
        # and it adds two units of its own last place at most
        slack = 2**-25 / (1 - uniform) + 2**-22 * wanted
        assert abs(float(found[token]) - wanted) <= slack
        wide = ((high << 32 | low) >> 11) + 0.5
        assert math.isclose(float(double[token]), -math.log1p(-wide / 2**53), rel_tol=1e-12)
    assert torch.equal(found, noise([seed], [position], vocab_size)[0])


def test_noise_is_exponential_and_independent() -> None:
    """Over tokens, over positions and over seeds that follow each other: by deciles, and the pairs of neighbours."""
    edges = -torch.log1p(-torch.arange(1, 10) / 10.0)
    rows = noise([3] * 40, list(range(40)), 5000)
    columns = noise(list(range(5000)), [9] * 5000, 40)
    for found in (rows, rows.T, columns, columns.T):
        assert found.isfinite().all()
        assert bool(((found > 0) & (found < 16.7)).all())
        deciles = torch.bucketize(found.contiguous(), edges)
        near(torch.bincount(deciles.flatten(), minlength=10), found.numel() / 10)
        pairs = deciles[:, 1:] * 10 + deciles[:, :-1]
        near(torch.bincount(pairs.flatten(), minlength=100), pairs.numel() / 100)


def near(counts: Tensor, expected: float) -> None:
    """Chi-square, within five standard deviations of its mean."""
    found, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert abs(found - freedom) < 5 * math.sqrt(2 * freedom)


def test_no_token_is_lost_where_the_hash_is_extreme() -> None:
    """Noise of infinity would make all of a row's scores 0, and noise of 0 would choose whatever the row says."""
    rows = noise(list(range(300)), [1] * 300, 20000)
    assert float(rows.max()) > 14
    assert float(rows.min()) < 1e-6
    assert (1.0 / rows).isfinite().all()
