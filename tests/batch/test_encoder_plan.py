"""Plans of encoders: whole prompts, sorted by length, whose rows see their request in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.batch.encoder_plan import EncoderPlanner


def batch_of(lengths: list[int], computed: list[int] | None = None, known: list[int] | None = None) -> BatchInput:
    zeros = [0] * len(lengths)
    return BatchInput(
        np.array(computed or zeros, np.int32),
        np.array(lengths, np.int32),
        np.array(known or lengths, np.int32),
        (np.zeros((len(lengths), 4), np.int32),),
        np.array([10 + row for row in range(len(lengths))]),
    )


def test_requests_of_a_length_are_next_to_each_other() -> None:
    plan = EncoderPlanner().plan(batch_of([7, 1, 7, 3]))
    assert plan.requests.tolist() == [1, 3, 0, 2]
    assert plan.table_rows.tolist() == [11, 13, 10, 12]
    assert plan.query_start.tolist() == [0, 1, 4, 11, 18]
    assert plan.positions.tolist() == [0, *range(3), *range(7), *range(7)]
    assert plan.logits_rows.tolist() == [0, 3, 10, 17]
    assert plan.num_single == 0
    assert plan.shared is None
    assert plan.unique is None
    assert plan.causal is not None
    assert plan.causal.groups.tolist() == [0, *[1] * 3, *[2] * 7, *[3] * 7]
    assert plan.causal.pairs() == 1 + 9 + 49 + 49


def test_a_slice_of_a_request_sees_all_of_it() -> None:
    plan = EncoderPlanner(causal_slice=4).plan(batch_of([10, 3]))
    assert plan.causal is not None
    assert plan.causal.slices == [(0, 3, 0, 3), (3, 7, 3, 13), (7, 11, 3, 13), (11, 13, 3, 13)]


@pytest.mark.parametrize(("computed", "known"), [([4], [8]), ([0], [9])])
def test_a_part_of_a_prompt_is_refused(computed: list[int], known: list[int]) -> None:
    with pytest.raises(ValueError, match="expected whole prompts"):
        EncoderPlanner().plan(batch_of([4], computed, known))
