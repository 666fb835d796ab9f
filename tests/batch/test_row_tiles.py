"""Rows in tiles: every row once, each tile within the reach, and a step fits every bucket that is no smaller."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gaudi_ucm.batch.row_tiles import RowTiles, cut_rows
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import TILE_ROWS, flat_tiles, is_bounded, levels

LENGTHS = st.lists(st.one_of(st.integers(2, 12), st.integers(2, 700), st.sampled_from([256, 512, 500])), max_size=30)


def bounds_of(single: int, lengths: list[int]) -> list[int]:
    return [single, *(single + np.cumsum(lengths)).tolist()]


def check(tiles: RowTiles, bounds: list[int], rows: int, reach: int) -> None:
    """What a bucket of so many rows and this reach computes is all that the requests' rows see."""
    room = levels(rows, reach)
    first, last = tiles.places(rows, room[0])
    owner = np.repeat(np.arange(len(bounds)), np.diff([0, *bounds]))
    begins = np.array([0, *bounds[:-1]])
    size = prompt_tiles.TILE_ROWS
    seen = np.zeros(rows, np.int64)
    depths = [sum(count > place for count in room) - 1 for place in range(len(first))]
    for place, (lo, hi, depth) in enumerate(zip(first.tolist(), last.tolist(), depths, strict=True)):
        if hi < lo:
            assert (lo, hi) == (1, 0), "a spare place"
            continue
        assert 0 <= lo <= hi < min(lo + size, rows)
        seen[lo : hi + 1] += 1
        for row in (lo, hi):
            if bounds[0] <= row < bounds[-1]:
                assert begins[owner[row]] >= lo - depth * size, (place, row)
    assert (seen == 1).all()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 300), LENGTHS, st.integers(0, 3000), st.integers(0, 9))
def test_a_step_fits_every_bucket_that_is_no_smaller(
    single: int, lengths: list[int], more_rows: int, more_reach: int
) -> None:
    bounds = bounds_of(single, lengths)
    if not bounds[-1]:
        return
    tiles = cut_rows(bounds)
    assert 1 <= tiles.reach <= flat_tiles(bounds[-1]), "buckets that know of no reach hold it"
    check(tiles, bounds, bounds[-1], tiles.reach)
    check(tiles, bounds, bounds[-1] + more_rows, tiles.reach + more_reach)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.lists(st.integers(2, 23), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 30))
def test_tiles_of_a_few_rows(single: int, lengths: list[int], size: int, more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_tiles, "TILE_ROWS", size)
        bounds = bounds_of(single, lengths)
        tiles = cut_rows(bounds)
        check(tiles, bounds, bounds[-1] + more, tiles.reach)


@given(st.integers(1, 40_000), st.integers(1, 20_000), st.integers(1, 40), st.integers(1, 40))
def test_levels_grow_with_rows_and_reach(rows: int, more: int, reach: int, further: int) -> None:
    less, greater = levels(rows, reach), levels(rows + more, reach + further)
    assert all(one <= other for one, other in zip(less, greater, strict=False))
    assert list(less) == sorted(less, reverse=True)


@pytest.mark.parametrize(
    ("single", "lengths", "reach"),
    [
        (0, [512] * 16, 2),
        (0, [500] * 16, 2),  # little is left out to begin each with a tile of its own
        (0, [256] * 16, 1),
        (0, [8192], 32),
        (32, [2048], 8),
        (64, [5] * 64, 1),  # packed: the one across the end of a tile begins the next one
        (9, [], 1),
        (300, [7], 1),
    ],
)
def test_reach_of_known_steps(single: int, lengths: list[int], reach: int) -> None:
    assert cut_rows(bounds_of(single, lengths)).reach == reach


def test_pairs_follow_the_lengths_of_requests() -> None:
    """16 prompts of 512 in 8192 rows: 1.3 times what they need at least; a prompt alone pays for itself."""
    for count, length in ((16, 512), (4, 2048), (1, 8192)):
        tiles = cut_rows(bounds_of(0, [length] * count))
        half = TILE_ROWS // 2
        room = levels(8192, tiles.reach)
        computed = room[0] * 3 * half**2 + sum(room[1:]) * TILE_ROWS**2
        assert computed <= 1.3 * count * length * (length + 1) / 2
        assert is_bounded(8192, tiles.reach) == (count > 1)


def test_starts_are_in_order_and_depths_reach_back_to_the_request() -> None:
    tiles = cut_rows(bounds_of(10, [600, 3, 900]))
    assert all(one < other for one, other in pairwise(tiles.starts.tolist()))
    assert tiles.starts[0] == 0
