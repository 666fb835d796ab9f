"""Memory of graphs: what is predicted from the skeleton, and what is left out until the rest fits a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS, steps
from tests.graphs.warm_up.sets import bucket_sets, keys_of, server_buckets
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import GraphMemory, MemoryBudgetError, fit_to_memory
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey

MIB = 2**20


@st.composite
def measured_sets(draw: st.DrawFn) -> tuple[BucketSet, dict[GraphKey, int]]:
    """A set, and what its skeleton was measured to take: anything at all."""
    buckets = draw(bucket_sets())
    skeleton = choose_skeleton(buckets, None, draw(st.integers(1, 4)))
    return buckets, {key: draw(st.integers(0, 2000)) * MIB for key in skeleton.keys}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_predictions_grow_with_the_shape_and_keep_to_what_was_measured(data: st.DataObject) -> None:
    """Whatever was measured, also where larger graphs took less."""
    buckets, measured = data.draw(measured_sets())
    memory = GraphMemory(measured)
    small, other = data.draw(steps(buckets.limits)).forward, data.draw(steps(buckets.limits)).forward
    large = ForwardShape.from_sizes("c" in small.phase + other.phase, *map(max, small.sizes, other.sizes))
    assert 0 <= memory.bytes_of(small) <= memory.bytes_of(large) <= max(measured.values())
    for key, size in measured.items():
        assert memory.bytes_of(key) >= size
        if isinstance(key, ForwardShape) and dominates(small.step(0), key.step(0)):
            assert memory.bytes_of(small) >= size
    assert memory.bytes_of(1) <= memory.bytes_of(buckets.logits[-1])


def test_predictions_follow_a_linear_law() -> None:
    """50 MiB and 1 MiB a row: four measurements are enough to tell the shapes between them."""

    def law(shape: ForwardShape) -> int:
        return (50 + shape.query_len) * MIB

    shapes = [ForwardShape("--u", 16, 0, 60), ForwardShape("c--", 100, 0, 0), ForwardShape("csu", 32, 119, 120)]
    memory = GraphMemory({shape: law(shape) for shape in (*shapes, LIMITS.maximum.forward)})
    for rows in (20, 64, 150, 200):
        shape = ForwardShape("c-u", rows, 0, 60)
        assert memory.bytes_of(shape) == pytest.approx(law(shape), rel=0.25)


def test_without_a_measurement_nothing_is_predicted() -> None:
    assert GraphMemory({LIMITS.maximum.forward: MIB}).bytes_of(16) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_kept_fits_and_the_skeleton_stays(data: st.DataObject) -> None:
    """The order does not depend on the budget: a smaller one drops the same buckets and more. covers: B7."""
    buckets, measured = data.draw(measured_sets())
    needed = sum(measured.values())
    budget = needed + data.draw(st.integers(0, 4000)) * MIB
    fit = fit_to_memory(buckets, measured, budget)
    assert fit.size <= budget
    assert sorted([*fit.kept, *fit.dropped], key=str) == sorted(keys_of(buckets), key=str)
    assert {key: fit.kept[key] for key in measured} == measured
    assert fit_to_memory(buckets, measured, budget) == fit
    least = fit_to_memory(buckets, measured, needed)
    assert list(least.dropped)[: len(fit.dropped)] == list(fit.dropped)
    if fit.dropped:
        last = list(fit.dropped)[-1]
        assert fit.size + GraphMemory(measured).bytes_of(last) > budget


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_odd_limits(name: str) -> None:
    """covers: A17, B7."""
    buckets = server_buckets(ODD_LIMITS[name], 24)
    measured = dict.fromkeys(choose_skeleton(buckets, None, 2).keys, 100 * MIB)
    fit = fit_to_memory(buckets, measured, 500 * MIB)
    assert set(measured) <= set(fit.kept)
    assert len(fit.kept) == min(5, buckets.num_graphs)


def test_the_largest_waste_goes_first() -> None:
    """Equal memory: a bucket whose steps have nearly as small a one beside it goes before one that saves much."""
    lone, twin, larger = ForwardShape("c--", 40, 0, 0), ForwardShape("--u", 16, 0, 60), ForwardShape("--u", 16, 0, 62)
    buckets = BucketSet([lone, twin, larger], [4], LIMITS, COST)
    measured: dict[GraphKey, int] = {LIMITS.maximum.forward: 100 * MIB, 16: MIB, 4: MIB}
    measured[lone] = 100 * MIB
    fit = fit_to_memory(buckets, measured, 302 * MIB)
    assert list(fit.dropped) == [twin]
    assert "about 0.098 GiB do not fit ucm.graphs.memory_budget (0.29 GiB)" in fit.dropped[twin]
    assert fit.dropped[twin].endswith("its steps run in bucket --u 16 0 62")
    least = fit_to_memory(buckets, measured, 202 * MIB)
    assert list(least.dropped) == [twin, larger]
    assert all(reason.endswith("its steps run in bucket csu 256 119 120") for reason in least.dropped.values())


def test_graphs_for_remainders_stay_and_tell_nothing_of_others() -> None:
    """covers: B7."""
    buckets = BucketSet([ForwardShape("--u", 16, 0, 60)], (), LIMITS, COST)
    tail = RemainderShape(ForwardShape("cs-", 256, 119, 0, 50))
    measured: dict[GraphKey, int] = {LIMITS.maximum.forward: 100 * MIB, 16: MIB, tail: 900 * MIB}
    assert GraphMemory(measured).bytes_of(LIMITS.maximum.forward) == 100 * MIB
    fit = fit_to_memory(buckets, measured, 1001 * MIB)
    assert fit.kept == measured
    assert list(fit.dropped) == list(buckets.forward[:-1])


def test_a_budget_below_the_skeleton_says_what_to_do() -> None:
    buckets = BucketSet((), (), LIMITS, COST)
    measured: dict[GraphKey, int] = {LIMITS.maximum.forward: 1024 * MIB, 16: 512 * MIB}
    with pytest.raises(MemoryBudgetError) as error:
        fit_to_memory(buckets, measured, 1024 * MIB)
    assert str(error.value) == (
        "ucm.graphs.memory_budget is 1.000 GiB, but the 2 graphs with which serving starts take 1.500 GiB; raise it, "
        "lower --max-num-batched-tokens (now 256), or start with fewer buckets (ucm.graphs.skeleton)"
    )
    assert fit_to_memory(buckets, measured, 1536 * MIB).dropped == {}
