"""Plans under a window, or in chunks, against an oracle that knows only positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import Request, Step, lay_out, steps
from tests.batch.expand import expand, expected, shared_pairs, unique_pairs
from tests.batch.steady_plan import assert_same
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.window import Window

# vLLM's null block, which stands where a window's blocks were freed
NULL = 0


def freed(step: Step, window: Window) -> Step:
    """Tables without the blocks that no row sees."""
    tables = []
    for request, table in zip(step.requests, step.tables, strict=True):
        first = int(window.first_seen(np.array([request.computed]))[0]) // step.block_size
        tables.append([NULL] * min(first, len(table)) + table[first:])
    return replace(step, tables=tables)


def cached_pairs(plan: UnifiedPlan, step: Step) -> list[tuple[int, int, int]]:
    return [*shared_pairs(plan, step), *unique_pairs(plan, step)]


@settings(max_examples=200)
@given(step=steps(), tokens=st.integers(1, 70), chunked=st.booleans(), causal_slice=st.sampled_from([1, 3, 512]))
def test_each_row_sees_what_its_window_leaves_once(step: Step, tokens: int, chunked: bool, causal_slice: int) -> None:
    """Windows of 1, of less than a block, of a block and beyond the context among them."""
    window = Window(tokens, chunked)
    gone = freed(step, window)
    plan = plan_batch(gone.batch_input(), step.block_size, causal_slice, window=window)
    assert expand(plan, step) == expected(plan, step, window)
    read = [part.blocks for part in (plan.shared, plan.unique) if part is not None]
    assert not any((blocks == NULL).any() for blocks in read)
    in_blocks = 0 if plan.shared is None else plan.shared.pairs(plan.row_requests)
    in_blocks += 0 if plan.unique is None else int((plan.unique.hi - plan.unique.lo).sum())
    new = 0 if plan.causal is None else plan.causal.pairs()
    assert in_blocks + new == expected(plan, step, window).total()
    # what `Limits` counts for a request
    blocks = {
        (int(plan.requests[plan.row_requests[row]]), at // step.block_size) for row, _, at in cached_pairs(plan, step)
    }
    most = max((sum(request == one for one, _ in blocks) for request in range(len(step.requests))), default=0)
    assert most <= -(-tokens // step.block_size) + 1


@given(step=steps())
def test_a_window_that_hides_nothing_is_no_window(step: Step) -> None:
    longest = max((r.computed + r.new for r in step.requests), default=1)
    for window in (Window(longest), Window(longest, chunked=True)):
        plan = plan_batch(step.batch_input(), step.block_size, window=window)
        assert_same(plan, plan_batch(step.batch_input(), step.block_size))


def test_work_follows_the_window() -> None:
    """A chunk behind a long context reads the blocks of its window, and slices of it begin where the window does."""
    step = lay_out([Request(1600, 64), Request(3200, 1)], 16, 0)
    plan = plan_batch(step.batch_input(), 16, 16, window=Window(20))
    assert plan.shared is not None
    assert plan.unique is not None
    assert plan.causal is not None
    assert len(plan.shared.blocks) == 2  # positions 1581 to 1599
    assert len(plan.unique.blocks) == 3  # positions 3181 to 3200
    assert plan.causal.slices == [(1, 17, 1, 17), (17, 33, 1, 33), (33, 49, 14, 49), (49, 65, 30, 65)]


def test_a_window_with_token_tables_is_an_error() -> None:
    batch = lay_out([Request(40, 1)], 16, 0).batch_input()
    batch = batch._replace(tables=(np.zeros((1, 2, 3), np.int32),))
    with pytest.raises(ValueError, match="a window with a selection or token tables"):
        plan_batch(batch, 16, window=Window(20))
