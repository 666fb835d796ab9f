"""Places of hidden states: each row of a step has its own, and a head's next pass reads behind its last one."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.batch.hidden_places import FIRST_PLACE, HiddenPlaces, num_places

NUM_DRAFTS = 3


def test_no_two_rows_share_a_place() -> None:
    """Requests with long and short contexts, whose head has passes beyond the rows of the step."""
    places = HiddenPlaces(8, 64)
    rows, computed, scheduled = np.array([5, 0, 3]), np.array([40, 0, 7], np.int32), np.array([4, 16, 1], np.int32)
    places.begin_step(rows, computed, scheduled, NUM_DRAFTS)
    taken = [
        int(places.kept[row]) + position
        for row, first, count in zip(rows.tolist(), computed.tolist(), scheduled.tolist(), strict=True)
        for position in range(first, first + count + NUM_DRAFTS)
    ]
    assert min(taken) == FIRST_PLACE
    assert len(set(taken)) == len(taken) == 21 + 3 * NUM_DRAFTS
    assert max(taken) < num_places(21, 3, NUM_DRAFTS)
