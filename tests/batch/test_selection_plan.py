"""The plan of a step's choices."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_gaudi_ucm.batch.selection_plan import DENSE, REUSE, SelectionInput, plan_selection
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode


@pytest.mark.parametrize(("num_drafts", "scored"), [(None, [1, 4, 11]), ([0, 0, 0, 1], [0, 4, 11])])
def test_blocks_are_scored_by_the_last_row_that_is_no_draft(num_drafts: list[int] | None, scored: list[int]) -> None:
    """Flat order: a verification, the rest of a prompt, a dense request, another rest."""
    requests, query_start = np.array([3, 1, 2, 0]), np.array([0, 2, 5, 9, 12])
    candidates = np.zeros((4, 3), np.bool_)
    candidates[[0, 1, 3], 1] = True
    modes, counts = np.array([0, 0, DENSE, 0]), np.array([1, 1, 0, 1])
    thresholds, slots = np.zeros((2, 4), np.int64)
    drafts = None if num_drafts is None else np.array(num_drafts)
    given = SelectionInput(modes, counts, thresholds, slots, candidates, 3, 1, num_drafts=drafts)
    everything = np.arange(4)
    for selection in (given, given.take(everything)):
        plan = plan_selection(selection, requests, query_start, np.ones((4, 3), np.int32), 16)
        assert plan is not None
        assert plan.num_rows.tolist() == [2, 3, 3]
        assert plan.candidate_places.tolist() == [1, 4, 7]
        assert plan.choice_places.tolist() == [0, 1, 2]
        assert plan.scored_rows.tolist() == scored


def test_a_request_that_reuses_its_choice_ranks_nothing() -> None:
    assert SelectionMode.REUSE == REUSE
    candidates, modes = np.ones((3, 2), np.bool_), np.array([*SelectionMode])
    counts, (thresholds, slots) = np.ones(3, np.int64), np.zeros((2, 3), np.int64)
    given = SelectionInput(modes, counts, thresholds, slots, candidates, 2, 1)
    plan = plan_selection(given, np.arange(3), np.array([0, 1, 3, 6]), np.ones((3, 2), np.int32), 16)
    assert plan is not None
    assert plan.num_rows.tolist() == [1, 2, 3]
    assert plan.ranked_rows.tolist() == [1, 0, 3]
