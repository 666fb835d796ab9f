"""The bound of tuning: below every possible choice, close to it, and each of its parts against its definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS
from tests.graphs.tuning import MAXIMUM, random_steps, seconds_of, sparse_steps
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Shapes, Steps, shape_seconds
from vllm_gaudi_ucm_tools.buckets.certificate import CeilingSearch, certify
from vllm_gaudi_ucm_tools.buckets.dual_prices import Ascent, DualPrices, first_prices, reduced_profits
from vllm_gaudi_ucm_tools.buckets.padding import measure_padding
from vllm_gaudi_ucm_tools.tuning.logits_rows import MAX_VALUES, best_rows, least_rows_seconds
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.tune import tune

pytestmark = pytest.mark.slow  # tunes many sets of buckets


def objective_of(seed: int, count: int, margin: float = 0.0) -> Objective:
    return Objective.of(Steps.from_buckets(random_steps(seed, count)), LIMITS, COST, margin)


def joins_of(points: Shapes) -> Shapes:
    """A join of any points is a join of at most four, one for each dimension."""
    groups = (group for size in range(1, 5) for group in itertools.combinations(range(len(points)), size))
    return np.unique([points[list(group)].max(axis=0) for group in groups], axis=0)


@cache
def least_seconds(seed: int, max_graphs: int) -> float:
    """Over all divisions of the graphs, all choices of joins, and all choices of observed rows."""
    objective = objective_of(seed, 6)
    joins = joins_of(objective.shapes)
    totals = []
    for k in range(max_graphs - 1):
        choices = itertools.combinations(joins, k)
        forward = min(
            seconds_of(np.array(choice, np.int64).reshape(-1, 4), objective.shapes, objective.weights)
            for choice in choices
        )
        rows = max_graphs - 2 - k
        totals.append(forward + min(rows_seconds(objective, (*few, LIMITS.max_num_seqs)) for few in row_choices(rows)))
    return min(totals)


def row_choices(k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, LIMITS.max_num_seqs), k))


def rows_seconds(objective: Objective, rows: tuple[int, ...]) -> float:
    padded = np.array([min(row for row in rows if row >= logits) for logits in objective.logits])
    return float(COST.logits_seconds(padded) @ objective.logits_weights)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_graphs", [2, 3, 4])
def test_the_bound_is_below_every_choice_and_within_a_few_percent(seed: int, max_graphs: int) -> None:
    """The relaxation may choose halves of shapes: with so few graphs that is worth up to some percent."""
    steps, best = Steps.from_buckets(random_steps(seed, 6)), least_seconds(seed, max_graphs)
    objective = objective_of(seed, 6)
    certified = certify(objective, tune(steps, LIMITS, COST, max_graphs, 0.0), max_graphs, gap=0.0)
    assert certified.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= certified.seconds <= 1.03 * best
    assert certified.bound >= 0.9 * best


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 40),
    max_graphs=st.integers(2, 20),
    margin=st.sampled_from([0.0, 0.05]),
)
def test_the_bound_is_below_the_cost(seed: int, count: int, max_graphs: int, margin: float) -> None:
    steps = Steps.from_buckets(random_steps(seed, count))
    objective = Objective.of(steps, LIMITS, COST, margin)
    buckets = tune(steps, LIMITS, COST, max_graphs, margin)
    certified = certify(objective, buckets, max_graphs, gap=0.05)
    assert objective.true_seconds * (1 - 1e-9) <= certified.bound <= certified.seconds * (1 + 1e-9)
    assert certified.seconds <= objective.padded_seconds(buckets) * (1 + 1e-9)
    assert certified.seconds == pytest.approx(objective.padded_seconds(certified.buckets))
    assert certified.buckets.num_graphs <= max_graphs


@pytest.mark.parametrize("max_graphs", [16, 32, 64])
def test_the_gap_is_small_and_shrinks_with_more_rounds(max_graphs: int) -> None:
    steps, objective = Steps.from_buckets(random_steps(3, 250)), objective_of(3, 250)
    buckets = tune(steps, LIMITS, COST, max_graphs, 0.0)
    quick, default, tight = (certify(objective, buckets, max_graphs, gap) for gap in (1.0, 0.025, 0.0))
    assert quick.buckets is buckets
    assert quick.gap >= default.gap >= tight.gap >= 0.0
    assert default.gap <= 0.025


@pytest.mark.parametrize("name", ODD_LIMITS)
def test_odd_limits_have_a_bound(name: str) -> None:
    """covers: A17, B7."""
    within = ODD_LIMITS[name]
    steps = Steps.from_buckets([Bucket("--u", 1, 0, 1, 1)] * 5)
    certified = certify(Objective.of(steps, within, COST, 0.0), tune(steps, within, COST, 4, 0.0), 4)
    assert certified.bound == pytest.approx(certified.seconds)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 7), tolerance=st.sampled_from([0.0, 0.1, 0.5]))
def test_no_shape_earns_more_than_the_ceiling(seed: int, count: int, tolerance: float) -> None:
    objective = objective_of(seed, count)
    prices = objective.seconds * np.random.default_rng(seed).uniform(1.0, 1.6, len(objective.seconds))
    joins = joins_of(objective.shapes)
    earned = reduced_profits(objective, prices, joins)
    fits = (joins[:, None] >= objective.shapes[None]).all(axis=2)
    gain = np.maximum(prices - shape_seconds(COST, joins)[:, None], 0.0)
    np.testing.assert_allclose(earned, (gain * fits) @ objective.weights, rtol=1e-9)
    graph_price = 0.5 * float(earned.max())
    ceiling = CeilingSearch(objective, prices, graph_price, tolerance).find_ceiling()
    assert earned.max() * (1 - 1e-9) <= ceiling.most <= earned.max() * (1 + tolerance) * (1 + 1e-9)
    assert (ceiling.profits > graph_price).all()
    np.testing.assert_allclose(reduced_profits(objective, prices, ceiling.shapes), ceiling.profits, rtol=1e-9)


def test_a_ceiling_without_boxes_is_loose_but_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(5, 200)
    prices = objective.seconds * 1.3
    exact = CeilingSearch(objective, prices, 0.0, 0.0).find_ceiling()
    monkeypatch.setattr("vllm_gaudi_ucm_tools.buckets.certificate.MAX_BOXES", 20)
    loose = CeilingSearch(objective, prices, 0.0, 0.0).find_ceiling()
    assert loose.most > exact.most * (1 + 1e-9)


def test_climbing_raises_the_dual_and_keeps_prices_within_reason() -> None:
    objective = objective_of(8, 150)
    chosen = objective.shapes[:: len(objective.shapes) // 10]
    prices, most = first_prices(objective, chosen)
    ascent = Ascent(objective, objective.shapes, len(chosen), most)
    found = ascent.find_prices(
        DualPrices(prices, np.full(len(objective.shapes), 1.0 / len(objective.shapes))), sweeps=4
    )
    assert ascent.value(found.seconds) > ascent.value(prices)
    assert found.shares.sum() == pytest.approx(1.0)
    assert (objective.seconds * (1 - 1e-9) <= found.seconds).all()
    assert (found.seconds <= most * (1 + 1e-9)).all()
    assert (most <= shape_seconds(COST, MAXIMUM)[0]).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40), k=st.integers(0, 8))
def test_the_two_cheapest_are_the_cheapest(seed: int, count: int, k: int) -> None:
    objective = objective_of(seed, count)
    chosen = joins_of(objective.shapes[:5])[:k]
    owner, first, second = objective.two_cheapest(chosen)
    everything = np.concatenate([chosen, MAXIMUM])
    fits = (everything[:, None] >= objective.shapes[None]).all(axis=2)
    prices = np.sort(np.where(fits, shape_seconds(COST, everything)[:, None], np.inf), axis=0)
    np.testing.assert_allclose(first, prices[0])
    two = np.concatenate([prices, np.full((1, len(first)), np.inf)])[1]
    np.testing.assert_allclose(second, np.where(np.isfinite(two), two, shape_seconds(COST, MAXIMUM)[0]))
    np.testing.assert_allclose(shape_seconds(COST, everything)[owner], first)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), most=st.integers(5, 100))
def test_a_coarse_objective_is_never_dearer(seed: int, most: int) -> None:
    """Its steps are parts of the true ones, so that whatever holds the true ones holds them."""
    objective = objective_of(seed, 200)
    coarse = objective.coarse(most)
    assert len(coarse.shapes) <= max(most, 8) or len(coarse.shapes) < len(objective.shapes)
    assert coarse.weights.sum() == pytest.approx(objective.weights.sum())
    assert coarse.true_seconds <= objective.true_seconds * (1 + 1e-9)
    for chosen in (MAXIMUM, objective.shapes[-3:]):
        _, fine, _ = objective.two_cheapest(chosen)
        _, rough, _ = coarse.two_cheapest(chosen)
        assert rough @ coarse.weights <= fine @ objective.weights * (1 + 1e-9)
    assert (np.unique(coarse.shapes, axis=0, return_counts=True)[1] == 1).all()


def test_a_log_too_large_is_bounded_on_coarse_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gaudi_ucm_tools.buckets.certificate.MAX_SHAPES", 100)
    steps = Steps.from_buckets(random_steps(2, 300))
    certified = certify(objective_of(2, 300), tune(steps, LIMITS, COST, 24, 0.0), 24)
    assert 0.0 <= certified.gap <= 0.1


def test_without_a_margin_the_objective_is_the_log() -> None:
    steps, objective = Steps.from_buckets(random_steps(1, 300)), objective_of(1, 300)
    buckets = tune(steps, LIMITS, COST, 12)
    padding = measure_padding(buckets, steps)
    assert objective.padded_seconds(buckets) == pytest.approx(padding.seconds)
    assert objective.true_seconds == pytest.approx(padding.true_seconds)
    assert objective_of(1, 300, margin=0.1).weights.sum() == pytest.approx(300)


def test_many_logits_rows_are_grouped_on_the_safe_side() -> None:
    """Grouped upwards where rows are chosen, downwards where they are bounded."""
    within = Limits(8192, 4096, 2048, 128, 120)
    rng = np.random.default_rng(0)
    steps = Steps.from_buckets([Bucket("--u", 9, 0, 3, int(rows)) for rows in rng.integers(1, 4097, 3000)])
    objective = Objective.of(steps, within, COST, 0.05)
    assert len(objective.logits) > MAX_VALUES
    best, values = best_rows(objective, 8)
    assert values[best.tops(8)[-1]] == 4096
    least = least_rows_seconds(objective, 8)
    for k in range(1, 9):
        tops = values[best.tops(k)]
        reached = float(COST.logits_seconds(tops[np.searchsorted(tops, objective.logits)]) @ objective.logits_weights)
        assert least[k - 1] <= reached <= best.total[k - 1] * (1 + 1e-9)
        assert reached <= 1.02 * least[k - 1]


def test_the_proof_holds_with_selected_blocks() -> None:
    """Five sizes: the bound is below the cost, and the rounds make the buckets no worse."""
    within, steps = replace(LIMITS, max_selected_blocks=200), Steps.from_buckets(sparse_steps(2, 40))
    objective, buckets = Objective.of(steps, within, COST, 0.0), tune(steps, within, COST, 10, 0.0)
    certified = certify(objective, buckets, 10, gap=0.01)
    assert certified.buckets.num_graphs <= 10
    assert certified.bound <= certified.seconds <= objective.padded_seconds(buckets)
    assert certified.gap < 0.15
    assert certified.seconds == pytest.approx(measure_padding(certified.buckets, steps).seconds)
