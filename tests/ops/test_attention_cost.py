"""The cost model of attention: its least squares, its features, and what is chosen by it, on made-up timings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel, Sample
from vllm_gaudi_ucm.ops.unified_attention.cost.features import LAYER_FEATURES, STEP_FEATURES, Features, features_of
from vllm_gaudi_ucm.ops.unified_attention.cost.grid import GEOMETRIES, Geometry, Step, make_parts, steps_of
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.least_squares import non_negative_least_squares
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import Uses, passes_of, uses_of
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way, cheapest_way, reads_slice

# Seconds that a device could take: close to those of the CPU that docs/performance.md names.
LAYER_SECONDS = {
    "native": {
        "one": 6e-6,
        "tiles": 2e-7,
        "loaded": 9e-11,
        "split": 2e-10,
        "few": 3e-11,
        "many": 1.7e-11,
        "large": 0.9e-11,
        "causal": 2e-11,
        "causal_large": 1e-11,
        "merged": 8e-10,
    },
    "cpu": {
        "one": 1e-4,
        "tiles": 2e-6,
        "loaded": 7e-10,
        "many": 2.2e-11,
        "large": 2.2e-11,
        "causal": 1.4e-11,
        "causal_large": 1.4e-11,
        "calls": 4e-5,
    },
    "reference": {"one": 8e-4, "loaded": 7e-9, "out": 9e-8, "sliced": 4e-9, "gathered": 6e-9},
}
STEP_SECONDS = {"native": {"one": 3e-4, "tiles": 1.6e-5}, "cpu": {"one": 2e-4, "passes": 3e-5}, "reference": {}}
NAMES = tuple(LAYER_SECONDS)
HELD_OUT = [
    Step(decodes, chunks, new, prefix, own)
    for decodes, chunks, new in ((1, 0, 0), (3, 0, 0), (8, 0, 0), (32, 0, 0), (0, 2, 16), (0, 12, 24), (5, 3, 64))
    for prefix in (0, 1, 6, 40)
    for own in (1, 200)
]


def shape_of(geometry: Geometry) -> LayerShape:
    return LayerShape(
        geometry.heads, geometry.kv_heads, geometry.dim, geometry.dim, geometry.dtype.itemsize, geometry.layers
    )


def uses(step: Step, geometry: Geometry) -> Uses:
    return uses_of(make_parts(step, geometry.block_size, torch.Generator().manual_seed(1)), geometry.block_size)


def true_seconds(name: str, features: Features) -> tuple[float, float]:
    layer = sum(features.layer[LAYER_FEATURES.index(key)] * value for key, value in LAYER_SECONDS[name].items())
    step = sum(features.step[STEP_FEATURES.index(key)] * value for key, value in STEP_SECONDS[name].items())
    return float(layer), float(step)


def ways(use: Uses) -> list[Way]:
    groups = frozenset(index for index, group in enumerate(use.shared) if len(group.first_rows) > 1)
    return [*map(Way, NAMES), *([Way("native", groups)] if groups else [])]


def fitted(noise: float) -> CostModel:
    """From the grid of a fit, each sample off by up to `noise`, as a share."""
    random = np.random.default_rng(7)
    samples = []
    for geometry in GEOMETRIES:
        for step in steps_of(geometry, slices=True):
            use = uses(step, geometry)
            for way in ways(use):
                features = features_of(use, passes_of(use, way.unsplit), shape_of(geometry))
                layer, once = (
                    value * (1 + noise * random.uniform(-1, 1)) for value in true_seconds(way.implementation, features)
                )
                samples.append(Sample(way.implementation, features, layer, once))
    return CostModel.fit(samples)


def test_least_squares_recover_what_is_not_negative() -> None:
    random = np.random.default_rng(0)
    matrix = random.uniform(0, 1, (60, 6)) * [1, 1e6, 1e-6, 1, 10, 0]
    wanted = np.array([0.5, 2e-6, 0.0, 3.0, 0.0, 0.0])
    np.testing.assert_allclose(non_negative_least_squares(matrix, matrix @ wanted), wanted, atol=1e-9)
    # the best without a bound has a negative entry; the best with it is found among all sets of columns
    target = matrix @ wanted - matrix[:, 4]
    found = non_negative_least_squares(matrix, target)
    assert (found >= 0).all()
    least = min(
        float(np.linalg.norm(matrix[:, free] @ solution - target))
        for mask in range(1, 64)
        for free in [[column for column in range(6) if mask >> column & 1]]
        for solution in [np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]]
        if (solution >= 0).all()
    )
    assert np.linalg.norm(matrix @ found - target) <= least * (1 + 1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_regret_on_steps_that_were_not_fitted(noise: float) -> None:
    """covers: A20, A22. At most 5 % on any step, so not splitting is never faster by more than that either."""
    model = fitted(noise)
    regrets, unsplit = [], 0
    for geometry in GEOMETRIES:
        shape = shape_of(geometry)
        for step in HELD_OUT:
            use = uses(step, geometry)

            def seconds(way: Way, use: Uses = use, shape: LayerShape = shape) -> float:
                layer, once = true_seconds(way.implementation, features_of(use, passes_of(use, way.unsplit), shape))
                return layer * shape.layers + once

            chosen = cheapest_way(model, use, shape, NAMES)
            unsplit += bool(chosen.unsplit)
            regrets.append(seconds(chosen) / min(seconds(way) for way in ways(use)) - 1)
    assert max(regrets) <= 0.05
    assert float(np.mean(regrets)) <= 0.01
    assert 0 < unsplit < len(regrets)


def test_a_candidate_needs_a_margin_and_measurements_of_that_size() -> None:
    geometry = GEOMETRIES[0]
    shape, model = shape_of(geometry), fitted(0.0)
    small, large = uses(Step(2, 0, 0, 4, 20), geometry), uses(Step(500, 0, 0, 4, 300), geometry)
    fast = CostModel({**model.coefficients, "cpu": model.coefficients["native"] * 0.5}, model.largest)
    near = CostModel({**model.coefficients, "cpu": model.coefficients["native"] * 0.95}, model.largest)
    assert cheapest_way(fast, small, shape, NAMES).implementation == "cpu"
    assert cheapest_way(near, small, shape, NAMES).implementation == "native"
    assert cheapest_way(fast, large, shape, NAMES).implementation == "native"
    assert cheapest_way(CostModel({}, {}), small, shape, NAMES) == Way("native")


def test_slice_or_gather_by_what_was_fitted() -> None:
    """covers: A15. The reference reads a whole slice, and copies what it gathers."""
    model, shape = fitted(0.0), shape_of(GEOMETRIES[0])
    chosen = [reads_slice(model, "reference", shape, blocks, 16, 16) for blocks in (16, 20, 60, 400)]
    assert chosen == sorted(chosen, reverse=True)
    assert (chosen[0], chosen[-1]) == (True, False)
    assert not reads_slice(model, "native", shape, 400, 16, 16)


def test_passes_of_a_step() -> None:
    """covers: A13, A14. Rows and tokens of the passes, split and not."""
    geometry = Geometry(4, 2, 16, torch.float32, 16, 2)
    use = uses(Step(2, 1, 8, 3, 20), geometry)
    assert (use.singles, use.chunks, use.unique_tokens, len(use.shared)) == (2, {2: 8}, 40, 2)
    split, whole = passes_of(use), passes_of(use, {0})
    lines = [sorted(zip(*(column.tolist() for column in one[:4]), strict=True)) for one in (split, whole)]
    assert lines[0] == [(1, 8, 20, 1), (1, 10, 48, 0), (2, 1, 20, 0)]
    assert lines[1] == [(1, 8, 68, 1), (2, 1, 68, 0)]
    assert (split.merged, whole.merged) == (20, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["coefficients"]["native"].popitem(), "expected exactly the features"),
        (
            lambda found: found["coefficients"]["native"].update({"layer.one": -1.0}),
            "layer.one is -1.0, expected a finite",
        ),
        (lambda found: found["largest"].pop("cpu"), "different implementations"),
        (lambda found: found.pop("largest"), "largest: found NoneType"),
    ],
)
def test_json(change: object, message: str) -> None:
    model = fitted(0.0)
    again = CostModel.from_json(model.to_json())
    assert again.to_json() == model.to_json()
    broken = model.to_json()
    change(broken)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(broken)
