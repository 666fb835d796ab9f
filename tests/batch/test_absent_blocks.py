"""`plan_batch` where blocks of a context are not on the device: in no mode does a row see them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import Step, steps
from tests.batch.expand import expand, expected
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.selection_plan import DENSE, SelectionInput
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode


@settings(max_examples=100, deadline=None)
@given(steps(), st.data())
def test_a_row_sees_every_position_but_those_of_absent_blocks(step: Step, data: st.DataObject) -> None:
    """covers: C8. Some requests choose among some of their other blocks, which are then no part of the rest."""
    batch = step.batch_input()
    requests, width = batch.block_tables.shape
    absent, candidates = np.zeros((2, requests, width), np.bool_)
    modes = np.full(requests, DENSE, np.int64)
    for index, request in enumerate(step.requests):
        full = request.computed // step.block_size
        absent[index, sorted(data.draw(st.sets(st.integers(0, full - 1)) if full else st.just(set())))] = True
        if data.draw(st.booleans()):
            candidates[index, :full] = ~absent[index, :full]
            modes[index] = SelectionMode.SELECT if candidates[index].any() else DENSE
            candidates[index] &= modes[index] != DENSE
    batch.block_tables[absent] = DUMMY_BLOCK
    counts, thresholds, slots = np.zeros((3, requests), np.int64)
    some_absent = absent if absent.any() else None
    selection = SelectionInput(modes, counts, thresholds, slots, candidates, width, 1, some_absent)

    plan = plan_batch(batch, step.block_size, 16, selection)

    left_out = absent | candidates
    wanted: Counter[tuple[int, int, int]] = Counter()
    for (row, request_index, position), times in expected(plan, step).items():
        # new tokens of a request with several rows are seen causally, whatever their blocks
        if (
            not left_out[request_index, position // step.block_size]
            or position >= step.requests[request_index].computed
        ):
            wanted[row, request_index, position] = times
    assert expand(plan, step) == wanted
    assert (plan.selection is None) == bool((modes == DENSE).all())
