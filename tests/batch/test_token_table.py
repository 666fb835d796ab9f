"""The runs of a token table are its slots, whatever is appended, taken away or grown in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.token_steps import LAYOUTS, lay_out_slots, slots_of
from vllm_gaudi_ucm.batch.token_table import TokenTable


@given(st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 4, 128]), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_appends(layout: str, tile: int, num_rows: int, rng: random.Random) -> None:
    """covers: A5"""
    lengths = [rng.randrange(80) for _ in range(num_rows)]
    flat = iter(range(sum(lengths)))
    wanted = lay_out_slots([[next(flat) for _ in range(length)] for length in lengths], layout, rng.randrange(1 << 16))
    table = TokenTable(1, tile)
    table.grow(num_rows)
    given_so_far = [0] * num_rows
    while any(count < len(slots) for count, slots in zip(given_so_far, wanted, strict=True)):
        for row, slots in enumerate(wanted):
            if rng.random() < 0.1:
                table.clear(row)
                given_so_far[row] = 0
            count = rng.choice([0, 1, 1, 1, 7, 40])
            table.append(row, slots[given_so_far[row] : given_so_far[row] + count])
            given_so_far[row] = min(given_so_far[row] + count, len(slots))
        table.flush()
        runs = table.blocks_of(np.arange(num_rows))
        for row, slots in enumerate(wanted):
            known = given_so_far[row]
            assert table.num_slots[row] == known
            assert slots_of(runs[row], known, tile) == slots[:known]
    whole = TokenTable(num_rows, tile)
    for row, slots in enumerate(wanted):
        whole.append(row, slots)
    whole.flush()
    assert np.array_equal(whole.blocks_of(np.arange(num_rows)), table.blocks_of(np.arange(num_rows)))


@pytest.mark.parametrize(("slots", "expected"), [(range(1, 301), 3), (range(300, 0, -1), 3), (range(1, 301, 2), 150)])
def test_contiguous_slots_are_a_run_for_each_tile(slots: range, expected: int) -> None:
    """Ascending, and descending as slots come back that were freed. Slot 1 is the first of a tile."""
    table = TokenTable(1, 128)
    for slot in slots:
        table.append(0, [slot])
        table.flush()
    assert table.num_runs[0] == expected
    assert table.blocks_of(np.array([0]))[0, :, 0].min() >= 128, "tile 0 is the dummy block"


def test_nothing_is_left_of_a_request() -> None:
    table = TokenTable(2, 4)
    table.append(0, range(1, 90, 2))
    table.flush()
    table.clear(0)
    assert table.blocks_of(np.array([0, 1])).shape[1] == 0
    table.append(1, [7])
    table.append(0, [3, 4])
    table.flush()
    assert table.blocks_of(np.array([0, 1])).tolist() == [[[6, 0, 1]], [[10, 0, 1]]]
