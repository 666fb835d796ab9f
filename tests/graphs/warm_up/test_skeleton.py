"""The skeleton: holds every step, costs little to warm, and is worth more than the configured maximum alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS, steps
from tests.graphs.warm_up.sets import bucket_sets, server_buckets, usages
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import Skeleton, choose_skeleton
from vllm_gaudi_ucm_tools.buckets.compile_cost import COMPILE_COSTS, graph_nodes
from vllm_gaudi_ucm_tools.buckets.padding import measure_padding


def modelled_seconds(shapes: list[ForwardShape], logits: list[int]) -> float:
    """Compilation of every graph and one run of it."""
    compile_cost = COMPILE_COSTS[COST.device.name]
    compilation = sum(compile_cost.seconds(graph_nodes(key)).high for key in (*shapes, *logits))
    return compilation + sum(map(COST.forward, shapes)) + float(COST.logits_seconds(logits).sum())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_skeleton_holds_every_step_and_is_part_of_the_set(data: st.DataObject) -> None:
    """covers: B1."""
    buckets = data.draw(bucket_sets())
    count = data.draw(st.integers(1, 6))
    skeleton = choose_skeleton(buckets, data.draw(usages(buckets.limits)), count)
    maximum = buckets.limits.maximum
    assert (skeleton.forward[0], skeleton.logits[0]) == (maximum.forward, maximum.logits)
    assert len(skeleton.forward) <= count
    assert len(set(skeleton.keys)) == len(skeleton.forward) + len(skeleton.logits)
    assert set(skeleton.forward) <= set(buckets.forward)
    assert set(skeleton.logits) <= set(buckets.logits)
    step = data.draw(steps(buckets.limits))
    assert dominates(BucketSet(*skeleton, buckets.limits, COST).lookup(step), step)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_more_buckets_never_cost_the_usage_more(data: st.DataObject) -> None:
    buckets = data.draw(bucket_sets())
    usage = Steps.from_buckets(data.draw(st.lists(steps(buckets.limits), min_size=1, max_size=8)))
    costs = []
    for count in range(1, 5):
        skeleton = choose_skeleton(buckets, usage, count)
        costs.append(measure_padding(BucketSet(*skeleton, buckets.limits, COST), usage).seconds)
    alone = measure_padding(BucketSet((), (), buckets.limits, COST), usage).seconds
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip([alone, *costs], costs, strict=False))


def test_the_first_graphs_of_a_sparse_server_hold_its_largest_selection() -> None:
    """Then come those that steps are expected in: dense decodes do not stay in a selected part. covers: B1."""
    within = replace(LIMITS, max_selected_blocks=4000)
    buckets = server_buckets(within, 40)
    dense, sparse = Bucket("--u", 4, 0, 30, 4), Bucket("--u", 4, 0, 30, 4, 4000)
    skeleton = choose_skeleton(buckets, Steps.from_buckets([dense] * 99), 2)
    assert skeleton.forward[0].selected_blocks == 4000
    warm = BucketSet(*skeleton, within, COST)
    assert dominates(warm.lookup(sparse), sparse)
    assert warm.lookup(dense).selected_blocks == 0


@pytest.mark.parametrize("strategy", ["padding_aware", "exponential", "linear"])
def test_skeleton_is_modelled_to_be_warm_in_a_tenth_of_the_time(strategy: str) -> None:
    buckets = server_buckets(strategy=strategy)
    skeleton = choose_skeleton(buckets, None, 4)
    assert len(skeleton.forward) == 4
    full = modelled_seconds(list(buckets.forward), list(buckets.logits))
    assert modelled_seconds(skeleton.forward, skeleton.logits) <= 0.1 * full


def test_usage_decides() -> None:
    """Decodes only: the first bucket beside the maximum is the one they run in."""
    decode, prompt = ForwardShape("--u", 16, 0, 100), ForwardShape("c--", 200, 0, 0)
    buckets = BucketSet([decode, prompt], [4, 8], LIMITS, COST)
    decodes = Steps.from_buckets([Bucket("--u", 9, 0, 40, 9)] * 5)
    prompts = Steps.from_buckets([Bucket("c--", 180, 0, 0, 1)] * 5)
    assert choose_skeleton(buckets, decodes, 2).forward == [LIMITS.maximum.forward, decode]
    assert choose_skeleton(buckets, prompts, 2).forward == [LIMITS.maximum.forward, prompt]


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_odd_limits(name: str) -> None:
    """covers: A17, B7."""
    buckets = server_buckets(ODD_LIMITS[name])
    skeleton = choose_skeleton(buckets, None, 4)
    assert skeleton.forward[0] == ODD_LIMITS[name].maximum.forward
    assert len(skeleton.forward) == min(4, len(buckets.forward))


def test_both_maxima_are_warmed_first() -> None:
    first, second = ForwardShape("csu", 9, 9, 9), ForwardShape("c--", 3, 0, 0)
    assert Skeleton([first, second], [8, 2]).keys == [first, 8, second, 2]


def test_a_skeleton_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 forward buckets: expected at least 1"):
        choose_skeleton(BucketSet((), (), LIMITS, COST), None, 0)
