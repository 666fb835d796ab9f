"""Which blocks should be on the device."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.memory_mode.placement import ChosenMoves, choose_moves
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

OPTIONS = BlockOptions(min_tokens=8, sparse_ratio=0.2, min_blocks=2, local_window_sz=2, init_window_sz=1)
SIZE = 4


def target(
    scores: list[float],
    offloaded: Set[int] = frozenset(),
    lost: Set[int] = frozenset(),
    on_device_ratio: float = 0.5,
    max_swaps: int = 8,
) -> ChosenMoves:
    return choose_moves(np.array(scores), offloaded, lost, SIZE, on_device_ratio, max_swaps, OPTIONS)


def test_the_best_stay_and_the_worst_leave_first() -> None:
    """12 blocks, 6 may stay: the sink, two of the window, and the three best of those between."""
    scores = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0, 0]
    assert target(scores) == ([1, 2, 3, 4, 5, 6], [])


def test_better_ones_come_back_for_worse_ones() -> None:
    scores = [0, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.1, 0, 0]
    assert target(scores, offloaded={1, 2, 3, 4, 5, 6}) == ([9], [1])


def test_as_many_swaps_as_allowed() -> None:
    scores = [0, 0.9, 0.8, 0.7, 0.4, 0.5, 0.1, 0.2, 0.3, 0, 0, 0]
    assert target(scores, offloaded={1, 2, 3, 4, 5, 9}, max_swaps=1) == ([6], [1])
    assert target(scores, offloaded={1, 2, 3, 4, 5, 9}, max_swaps=8) == ([6, 7, 8], [1, 2, 3])


def test_blocks_without_a_score_stay_and_take_room() -> None:
    scores = [0, 0.1, -1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0, 0]
    assert target(scores) == ([1, 3, 4, 5, 6, 7], [])


def test_a_lost_block_does_not_come_back() -> None:
    scores = [0, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.1, 0, 0]
    assert target(scores, offloaded={1, 2, 3, 4, 5, 6}, lost={1}) == ([9], [6])


def test_a_short_context_stays() -> None:
    assert target([0.5]) == ([], [])


@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_any_context(data: st.DataObject) -> None:
    """Sinks, window and unscored blocks never leave; what is attended always has room; nothing is in both lists."""
    scores = data.draw(st.lists(st.one_of(st.just(-1.0), st.floats(0, 1)), min_size=1, max_size=40))
    offloaded = set(data.draw(st.lists(st.integers(1, max(1, len(scores) - 4))))) & set(range(1, len(scores) - 2))
    ratio = data.draw(st.floats(0.2, 1))
    to_evict, to_load = target(scores, offloaded, on_device_ratio=ratio)
    budget = block_budget(len(scores) * SIZE, SIZE, OPTIONS)
    if budget is None:
        assert (to_evict, to_load) == ([], [])
        return
    between = set(range(budget.sink_blocks, budget.window_start))
    assert set(to_evict) <= between - offloaded
    assert set(to_load) <= between & offloaded
    assert all(scores[number] >= 0 for number in (*to_evict, *to_load))
    left = between - offloaded - set(to_evict)
    if to_evict:
        assert len(left) + len(to_load) >= budget.num_selected
        assert len(left) + len(to_load) >= np.ceil(ratio * len(scores) - 1e-9) - (len(scores) - len(between))
