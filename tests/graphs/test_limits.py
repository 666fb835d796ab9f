"""Limits: the maximum of each dimension."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.graphs.shapes import ODD_LIMITS, SPARSE_LIMITS, limits
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import SPARE_RANGES, Limits, LimitsError, default_shared_blocks, strip_size


def test_the_shared_axis_holds_many_cached_prompts() -> None:
    """Eight prompts with a cached context of their own each share all of it among their rows. covers: B3."""
    within = Limits(2048, 8, 4096, 128, 10_000)
    assert within.most_shared_blocks == 8 * 32
    assert Limits(2048, 8, 4096, 128, 100).most_shared_blocks == 99


def test_the_unique_axis_follows_how_it_is_read() -> None:
    assert Limits(64, 4, 256, 128, 1000, contiguous=True).max_unique_blocks == 1000
    assert Limits(64, 4, 256, 128, 1000, contiguous=False).max_unique_blocks == 8


def test_the_maximum_names_every_part() -> None:
    assert Limits(2048, 64, 8192, 128, 3000).maximum == Bucket("csu", 2048, 2999, 3000, 64)


@given(limits())
def test_every_phase_is_within_the_maximum(within: Limits) -> None:
    for parts in [(c, s, u) for c in (False, True) for s in (False, True) for u in (False, True)]:
        top = within.phase_maximum(*parts)
        assert all(size <= most for size, most in zip(top.sizes, within.maximum.forward.sizes, strict=True))
        assert top.selected_blocks == 0
        assert within.phase_maximum(*parts, selected=True).selected_blocks == within.max_selected_blocks
        assert top.query_len >= 1


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_odd_limits_allow_a_decode_of_one_request(name: str) -> None:
    """covers: A17, B7."""
    assert ODD_LIMITS[name].allows(False, 1, 0, 1)


def test_what_cannot_occur_is_not_allowed() -> None:
    one = Limits(512, 1, 4096, 128, 100)
    assert one.allows(True, 512, 31, 0)
    assert not one.allows(True, 512, 0, 1)  # one request cannot be a prompt and a decode
    assert not one.allows(False, 1, 1, 0)  # a shared block has two rows
    gathered = Limits(512, 8, 4096, 128, 100, contiguous=False)
    assert gathered.allows(True, 64, 50, 49)
    assert not gathered.allows(True, 64, 50, 50)  # distinct blocks of a cache that has 99


@pytest.mark.parametrize("name", SPARSE_LIMITS)
def test_selected_blocks_go_with_any_step_up_to_their_limit(name: str) -> None:
    """Several requests may choose the same block, so the cache does not bound them. covers: C16."""
    within = SPARSE_LIMITS[name]
    most = within.max_selected_blocks
    assert within.maximum.selected_blocks == most
    assert within.allows(False, 1, 0, 1, most)
    assert not within.allows(False, 1, 0, 1, most + 1)
    assert not within.dense.allows(False, 1, 0, 1, 1)
    assert within.dense == ODD_LIMITS[name]
    assert within.dense.maximum.selected_blocks == 0


def test_a_negative_limit_of_selected_blocks_is_named() -> None:
    with pytest.raises(LimitsError, match="max_selected_blocks is -1, expected 0"):
        Limits(8, 8, 8, 8, 8, max_selected_blocks=-1)


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks"]
)
def test_an_impossible_limit_is_named(name: str) -> None:
    sizes = dict.fromkeys(["max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks"], 8)
    with pytest.raises(LimitsError, match=name):
        Limits(**{**sizes, name: 0})


def test_slots_for_tokens_have_a_range_for_each_strip() -> None:
    """Of a request, and of the cache; the shared axis holds those of one request at least."""
    within = Limits(2048, 64, 4096, 128, 1001, contiguous=False, strip=strip_size(128))
    assert within.blocks_per_request == 4096 // 64 + SPARE_RANGES
    assert within.max_unique_blocks == within.max_context_blocks == 2000
    assert default_shared_blocks(4096, 128, 64) == 80
    assert default_shared_blocks(32768, 128, 64) == 512 + SPARE_RANGES
    tiny = Limits(8, 1, 256, 16, 3, contiguous=False, strip=8)
    assert tiny.max_unique_blocks == tiny.blocks_per_request == 32 + SPARE_RANGES
    with pytest.raises(LimitsError, match="the ranges of one request of 4096 tokens"):
        Limits(2048, 64, 4096, 128, 1001, contiguous=False, strip=64, max_shared_blocks=79)
    with pytest.raises(LimitsError, match="limit strip is 129"):
        Limits(2048, 64, 4096, 128, 1001, strip=129)


@pytest.mark.parametrize(("block_size", "size"), [(128, 64), (16, 8), (2, 1), (1, 1), (24, 12), (27, 9), (7, 1)])
def test_blocks_are_made_of_strips(block_size: int, size: int) -> None:
    assert strip_size(block_size) == size


def test_without_a_cache_every_step_is_one_of_prompts() -> None:
    """An encoder has only the dummy block."""
    within = Limits(512, 8, 128, 128, 1)
    assert not within.has_cache
    assert within.maximum == Bucket("c--", 512, 0, 0, 8)
    assert within.allows(True, 1, 0, 0)
    assert within.allows(True, 512, 0, 0)
    assert not within.allows(True, 513, 0, 0)
    assert not within.allows(True, 4, 1, 0)
    assert not within.allows(True, 4, 0, 1)
    assert not within.allows(False, 4, 0, 0)
    for parts in [(c, s, u) for c in (False, True) for s in (False, True) for u in (False, True)]:
        assert within.phase_maximum(*parts) == within.maximum.forward
