"""Positions on three axes: of prompts with pictures, and of tokens behind them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.batch.plans_of_rows import plan
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.mrope_positions import MropePositions

# two words, a picture of 2 x 3 tokens, a word
PICTURE = np.array(
    [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
)
DELTA = 6 - PICTURE.shape[1]


def of_request(found: NDArray[np.integer], step: UnifiedPlan, row: int) -> list[list[int]]:
    return found[:, step.table_rows[step.row_requests] == row].tolist()


def test_a_text_has_its_index_on_all_axes() -> None:
    positions = MropePositions(4, 32)
    positions.place(1, np.broadcast_to(np.arange(5), (3, 5)), 0)
    step = plan([0, 7], [5, 1], [1, 2])
    found = positions.of(step)
    assert found.shape == MropePositions.shape(6)
    assert of_request(found, step, 1) == [list(range(5))] * 3
    assert of_request(found, step, 2) == [[7]] * 3


def test_chunks_of_a_prompt_with_a_picture_and_what_follows() -> None:
    """A chunk ends inside of the picture; the next one ends two drafts behind the prompt."""
    positions = MropePositions(4, 32)
    positions.place(3, PICTURE, DELTA)
    step = plan([0, 4], [4, 2], [3, 0])
    assert of_request(positions.of(step), step, 3) == PICTURE[:, :4].tolist()
    assert of_request(positions.of(step), step, 0) == [[4, 5]] * 3
    step = plan([4], [7], [3])
    behind = [[9 + DELTA, 10 + DELTA]] * 3
    assert of_request(positions.of(step), step, 3) == [
        [*ours, *theirs] for ours, theirs in zip(PICTURE[:, 4:].tolist(), behind, strict=True)
    ]


def test_the_next_owner_of_a_row_begins_anew() -> None:
    positions = MropePositions(2, 32)
    positions.place(1, PICTURE, DELTA)
    positions.remove(1)
    step = plan([0], [9], [1])
    assert of_request(positions.of(step), step, 1) == [list(range(9))] * 3
    positions.place(1, PICTURE, DELTA)
    positions.place(1, np.broadcast_to(np.arange(4), (3, 4)), 0)
    assert of_request(positions.of(step), step, 1) == [list(range(9))] * 3


def test_a_larger_table_keeps_positions() -> None:
    positions = MropePositions(2, 32)
    positions.place(0, PICTURE, DELTA)
    positions.grow(4)
    step = plan([0, 0], [9, 2], [0, 3])
    assert of_request(positions.of(step), step, 0) == PICTURE.tolist()
    assert of_request(positions.of(step), step, 3) == [[0, 1]] * 3
