"""Budgets: every option's effect, and that no block is ever named that does not exist."""

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.sparse.budget import Budget, block_budget, shortest_sparse_context
from vllm_gaudi_ucm.sparse.options import BlockOptions


def options(**changes: Any) -> BlockOptions:
    return BlockOptions.resolve({"min_tokens": 1, **changes}, "options")


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, Budget(1, 98, 27)),  # 30 of 100 full blocks, 3 of them sinks and window
        ({"sparse_ratio": 0.05}, Budget(1, 98, 2)),
        ({"sparse_ratio": 1.0}, Budget(1, 98, 97)),
        ({"sparse_ratio": 0.05, "min_blocks": 10}, Budget(1, 98, 7)),
        ({"local_window_sz": 20}, Budget(1, 80, 9)),
        ({"init_window_sz": 0}, Budget(0, 98, 28)),
        ({"init_window_sz": 40}, Budget(40, 98, 1)),  # the windows are more than the budget: one more, to choose at all
    ],
)
def test_effect_of_each_option(changes: dict[str, Any], budget: Budget) -> None:
    """covers: C4. 100 full blocks of 16 tokens and a tail of 5."""
    assert block_budget(100 * 16 + 5, 16, options(**changes)) == budget


def test_ratio_is_rounded_up_but_not_by_binary_fractions() -> None:
    assert block_budget(10 * 16, 16, options(sparse_ratio=0.7)) == Budget(1, 8, 4)
    assert block_budget(10 * 16, 16, options(sparse_ratio=0.71)) == Budget(1, 8, 5)


def test_below_min_tokens_a_context_is_dense() -> None:
    assert block_budget(2047, 16, BlockOptions()) is None
    assert block_budget(2048, 16, BlockOptions()) == Budget(1, 126, 36)


@pytest.mark.parametrize("tokens", [1, 3, 4, 11, 12, 15])
def test_windows_that_cover_the_context_leave_it_dense(tokens: int) -> None:
    """covers: C13, C24. Down to a prompt that is shorter than a block."""
    assert block_budget(tokens, 4, options()) is None


def test_shortest_sparse_context() -> None:
    for changes in ({}, {"min_tokens": 50}, {"local_window_sz": 7}, {"init_window_sz": 0}):
        least = shortest_sparse_context(4, options(**changes))
        assert block_budget(least, 4, options(**changes)) is not None
        assert block_budget(least - 1, 4, options(**changes)) is None


OPTIONS = st.builds(
    options,
    sparse_ratio=st.floats(0.001, 1.0),
    local_window_sz=st.integers(1, 12),
    init_window_sz=st.integers(0, 12),
    min_blocks=st.integers(1, 40),
    min_tokens=st.integers(1, 100),
)


@given(st.integers(1, 2000), st.sampled_from([1, 4, 16, 128]), OPTIONS)
def test_budget_keeps_its_promises(tokens: int, block_size: int, chosen: BlockOptions) -> None:
    """covers: C12, C13. Sinks, window and candidates part the full blocks; the tail lies behind the window's start."""
    budget = block_budget(tokens, block_size, chosen)
    full = tokens // block_size
    if budget is None:
        too_short = tokens < chosen.min_tokens
        assert too_short or full <= chosen.init_window_sz + chosen.local_window_sz
        return
    assert budget.sink_blocks == chosen.init_window_sz
    assert budget.window_start == full - chosen.local_window_sz
    assert 1 <= budget.num_selected <= budget.num_candidates == budget.window_start - budget.sink_blocks
    attended = full - budget.num_candidates + budget.num_selected
    wanted = max(chosen.min_blocks, math.ceil(Fraction(chosen.sparse_ratio) * full - Fraction(1, 10**8)))
    assert min(full, wanted) <= attended or budget.num_selected == budget.num_candidates
    live = full - budget.num_candidates
    assert attended <= max(chosen.min_blocks, math.ceil(Fraction(chosen.sparse_ratio) * full), live + 1)
