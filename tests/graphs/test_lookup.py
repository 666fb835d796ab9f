"""The lookup of a step's bucket: total, the cheapest, monotone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS, forward_shapes, limits, steps
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.steps import graph_array


@st.composite
def cases(draw: st.DrawFn) -> tuple[BucketSet, Bucket]:
    within = draw(limits())
    rows = draw(st.lists(st.integers(1, within.max_num_seqs), max_size=4))
    return BucketSet(draw(forward_shapes(within)), rows, within, COST), draw(steps(within))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_lookup_is_total_and_the_cheapest_that_dominates(case: tuple[BucketSet, Bucket]) -> None:
    """Against every bucket there is; covers: B1, B2."""
    buckets, step = case
    found = buckets.lookup(step)
    everything = [shape.step(rows) for shape in buckets.forward for rows in (0, *buckets.logits)]
    fitting = [bucket for bucket in everything if dominates(bucket, step)]
    assert found in fitting
    assert COST.step(found) == pytest.approx(min(map(COST.step, fitting)), rel=1e-12)
    assert buckets.lookup(step) == found


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_a_larger_step_never_costs_less(case: tuple[BucketSet, Bucket], data: st.DataObject) -> None:
    buckets, step = case
    other = data.draw(steps(buckets.limits))
    sizes = map(max, step.forward.sizes, other.forward.sizes)
    larger = ForwardShape.from_sizes("c" in step.phase + other.phase, *sizes).step(max(step.logits, other.logits))
    assert COST.step(buckets.lookup(larger)) >= COST.step(buckets.lookup(step))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_bucket_holds_itself_and_assign_agrees(case: tuple[BucketSet, Bucket]) -> None:
    """No other shape takes a step of exactly a bucket's size, also where padding is free."""
    buckets, _ = case
    for shape in buckets.forward:
        assert buckets.lookup(shape.step(1)).forward == shape
    assert buckets.assign(graph_array(buckets.forward)).tolist() == list(range(len(buckets.forward)))


def test_the_phase_decides_not_the_order_of_the_list() -> None:
    """A step with a causal part never runs in a cheaper bucket without; an absent part may be present. covers: B2."""
    shapes = [ForwardShape("--u", 16, 0, 50), ForwardShape("csu", 64, 20, 60), ForwardShape("c-u", 64, 0, 60)]
    buckets = BucketSet(shapes, [4], LIMITS, COST)
    assert buckets.lookup(Bucket("--u", 3, 0, 9, 3)) == Bucket("--u", 16, 0, 50, 4)
    assert buckets.lookup(Bucket("c--", 30, 0, 0, 1)) == Bucket("c-u", 64, 0, 60, 4)
    assert buckets.lookup(Bucket("-s-", 3, 5, 0, 0)) == Bucket("csu", 64, 20, 60, 0)
    assert buckets.lookup(Bucket("csu", 65, 1, 1, 16)) == LIMITS.maximum


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_the_maximum_is_always_there(name: str) -> None:
    """covers: A17, B7."""
    within = ODD_LIMITS[name]
    buckets = BucketSet((), (), within, COST)
    assert buckets.num_graphs == 2
    assert buckets.lookup(within.maximum) == within.maximum
    assert buckets.lookup(Bucket("--u", 1, 0, 1, 1)) == within.maximum


def test_a_step_takes_the_smallest_selected_part_that_is_enough() -> None:
    """A dense step takes none where it can; another is never cut to fewer blocks. covers: C13."""
    within = replace(LIMITS, max_selected_blocks=64)
    decode = ForwardShape("--u", 16, 0, 50)
    buckets = BucketSet([decode, decode.with_selected(8), decode.with_selected(64)], [4], within, COST)
    assert buckets.selected == (0, 8, 64)
    for selected, found in ((0, 0), (1, 8), (8, 8), (9, 64), (64, 64)):
        assert buckets.lookup(Bucket("--u", 3, 0, 9, 3, selected)) == decode.with_selected(found).step(4)
    assert buckets.lookup(Bucket("c-u", 3, 0, 9, 3, 0)) == within.maximum._replace(logits=4)
    with pytest.raises(LimitsError, match="selected_blocks 65 > 64"):
        buckets.lookup(Bucket("--u", 3, 0, 9, 3, 65))
    with pytest.raises(LimitsError, match="selected_blocks 1 > 0"):
        BucketSet([decode], [4], LIMITS, COST).lookup(Bucket("--u", 3, 0, 9, 3, 1))


def test_a_step_takes_the_fewest_prompt_tiles_that_are_enough() -> None:
    """A step of few rows cannot look back further than they are; one that says nothing takes no bound. covers: B2"""
    within = Limits(8192, 16, 8192, 128, 120)
    prompts = ForwardShape("c--", 4096, 0, 0)
    buckets = BucketSet([prompts.with_prompt_tiles(2), prompts.with_prompt_tiles(4), prompts], [4], within, COST)
    for rows, tiles, found in (
        (4096, 1, 2),
        (4096, 2, 2),
        (4000, 3, 4),
        (4000, 5, ALL_TILES),
        (4000, ALL_TILES, ALL_TILES),
        (512, ALL_TILES, 2),
    ):
        step = Bucket("c--", rows, 0, 0, 3, 0, tiles)
        assert buckets.lookup(step) == prompts.with_prompt_tiles(found).step(4)
        assert dominates(buckets.lookup(step), step)
        assert buckets.forward[int(buckets.assign(graph_array([step]))[0])] == prompts.with_prompt_tiles(found)
    assert buckets.lookup(Bucket("---", 3, 0, 0, 1)) == prompts.with_prompt_tiles(2).step(4), "nothing to look back on"


def test_prompt_tiles_are_written_where_they_are_a_bound() -> None:
    shape = ForwardShape.from_sizes(True, 600, 0, 0, 0, 2)
    assert shape.to_list() == ["c--", 600, 0, 0, 0, 2]
    assert shape.step(4).to_list() == ["c--", 600, 0, 0, 4, 0, 2]
    assert shape.with_prompt_tiles(3) == ForwardShape("c--", 600, 0, 0), "600 rows are three tiles"
    assert ForwardShape.from_sizes(False, 600, 0, 9, 0, 2) == ForwardShape("--u", 600, 0, 9)


def test_a_shape_and_its_logits_rows_make_a_bucket() -> None:
    shape = ForwardShape("-su", 4, 3, 2, 7)
    assert shape.step(4) == Bucket("-su", 4, 3, 2, 4, 7)
    assert shape.step(4).forward == shape
    assert shape.to_list() == ["-su", 4, 3, 2, 7]
    assert shape.with_selected(0).to_list() == ["-su", 4, 3, 2]


def test_a_step_beyond_the_limits_names_the_dimension() -> None:
    buckets = BucketSet((), (), LIMITS, COST)
    with pytest.raises(LimitsError, match="query_len 257 > 256"):
        buckets.lookup(Bucket("c--", 257, 0, 0, 1))
    with pytest.raises(LimitsError, match="logits 17 > 16"):
        buckets.lookup(Bucket("c--", 20, 0, 0, 17))


@pytest.mark.parametrize(
    "shape", [("--u", 4, 3, 5), ("csu", 0, 1, 1), ("c-u", 4, 0, -1), ("x--", 4, 0, 0), ("c--", 4, 0, 0, -1)]
)
def test_a_shape_that_contradicts_itself_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        BucketSet([ForwardShape(*shape)], (), LIMITS, COST)


def test_dominates_wants_every_dimension_and_every_part() -> None:
    bucket = Bucket("cs-", 8, 4, 0, 2)
    assert dominates(bucket, Bucket("-s-", 8, 4, 0, 2))
    assert not dominates(bucket, Bucket("--u", 1, 0, 1, 1))
    for axis in range(1, 6):
        larger = list(bucket)
        larger[axis] += 1
        assert not dominates(bucket, Bucket(*larger))


def test_ten_thousand_random_steps_all_find_a_bucket() -> None:
    rng = np.random.default_rng(5)
    within = Limits(2048, 64, 8192, 128, 3000)
    shapes = [
        ForwardShape.from_sizes(c, q, s, u)
        for c, q, s, u in itertools.product((0, 1), (8, 64, 512), (0, 100), (0, 900))
    ]
    buckets = BucketSet(shapes, [1, 8, 32], within, COST)
    most = within.maximum
    sizes = rng.integers(1, np.array(most[1:5]) + 1, (10_000, 4)).tolist()
    for q, s, u, rows in sizes:
        step = Bucket("csu", q, s, u, rows)
        assert dominates(buckets.lookup(step), step)
