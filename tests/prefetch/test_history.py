"""Decayed counts and positions: the order in which blocks are prefetched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prefetch.stores import key, keys
from vllm_gaudi_ucm.prefetch.plan import AccessHistory


def test_counts_lose_half_of_their_weight_in_a_half_life() -> None:
    """covers: C14"""
    history = AccessHistory(10, half_life=4)
    history.record(keys(1, 1, 2))
    assert (history.count(key(1)), history.count(key(2)), history.count(key(3))) == (2.0, 1.0, 0.0)
    history.advance(4)
    assert history.count(key(1)) == 1.0
    history.record(keys(1))
    assert history.count(key(1)) == 2.0
    history.advance(8)
    assert history.count(key(1)) == 0.5


def test_newer_blocks_first_and_sinks_before_all() -> None:
    history = AccessHistory(10)
    assert history.order(keys(0, 1, 2, 3)) == [0, 3, 2, 1]
    assert history.order(keys(0, 1, 2, 3), sinks=2) == [0, 1, 3, 2]
    assert history.order([]) == []
    assert history.order(keys(7)) == [0]


def test_blocks_in_use_come_before_newer_ones() -> None:
    history = AccessHistory(10, half_life=8)
    history.record(keys(1, 1))
    assert history.order(keys(0, 1, 2, 3)) == [0, 1, 3, 2]
    history.advance(80)
    assert history.order(keys(0, 1, 2, 3)) == [0, 3, 2, 1], "old accesses do not dominate"


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 20), max_size=60), st.integers(0, 3))
def test_an_order_names_every_block_once(wanted: list[int], accessed: list[int], sinks: int) -> None:
    history = AccessHistory(5)
    history.record(keys(*accessed))
    assert len(history) <= 5
    order = history.order(keys(*wanted), sinks)
    assert sorted(order) == list(range(len(wanted)))
    assert order[:sinks] == list(range(min(sinks, len(wanted))))


def test_the_least_recently_used_keys_are_forgotten() -> None:
    history = AccessHistory(2)
    history.record(keys(1, 2, 1, 3))
    assert [history.count(key(number)) for number in (1, 2, 3)] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize(("capacity", "half_life"), [(0, 1.0), (1, 0.0)])
def test_wrong_sizes_are_refused(capacity: int, half_life: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        AccessHistory(capacity, half_life)
