"""Seeds: any integer is one, and the noise of a request follows from it alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.sampling.sampling_twins import VOCAB, Twins, assert_same, engine_config
from vllm_gaudi_ucm.sampling.slot_noise import noise_seed

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@given(st.integers(LEAST, MOST))
def test_a_seed_of_64_bits_is_itself(seed: int) -> None:
    assert noise_seed(seed) == seed


@given(st.integers(), st.integers(0, 200))
def test_any_integer_gives_64_bits(seed: int, bits: int) -> None:
    wide = (1 << 63) + (abs(seed) << bits)
    for one in (wide, -wide - 1):
        assert LEAST <= noise_seed(one) <= MOST
        assert noise_seed(one) == noise_seed(one)


def test_seeds_that_are_near_each_other_differ() -> None:
    """The children of a request have seed + i; what is hashed stays the same from version to version."""
    seeds = [MOST + i for i in range(-8, 9)] + [LEAST - i for i in range(1, 9)] + [1 << 64, 1 << 70, 10**40, -(10**40)]
    assert len({noise_seed(seed) for seed in seeds}) == len(seeds)
    assert noise_seed(1 << 63) == -7599528413529344465


def test_children_of_the_largest_seed_are_sampled() -> None:
    """Each as it is alone, with vLLM's sampler and at static shapes."""
    twins = Twins(engine_config())
    logits = torch.zeros(4, VOCAB)
    for seeds in ([MOST, MOST + 1, MOST + 2], [MOST + 1], [LEAST - 1, 10**30]):
        names = [twins.add(SamplingParams(temperature=1.0, seed=seed), name=f"{seeds} {seed}") for seed in seeds]
        twins.sync(names)
        found, expected = twins.sample(logits.clone())
        assert_same(found, expected)
        if seeds == [MOST, MOST + 1, MOST + 2]:
            together = dict(zip(twins.batch.req_ids, found.tokens, strict=True))
        elif seeds == [MOST + 1]:
            assert found.tokens == [together[f"{[MOST, MOST + 1, MOST + 2]} {MOST + 1}"]]
    assert np.unique(list(together.values())).size > 1
