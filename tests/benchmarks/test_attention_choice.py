"""The benchmark of attention's choice: its regret, its ratios, and a small step measured in every way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.attention_case import Case
from benchmarks.attention_choice import PREFIXES, cases, measure_case
from benchmarks.attention_choice_result import CaseResult, summary
from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import NAMES, CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way

SPLIT, WHOLE, TORCH = Way("native"), Way("native", frozenset({0})), Way("cpu")
CASE = Case("2 decodes", 2, 160, 1, shared=128)


def test_regret_and_ratios() -> None:
    best = CaseResult(CASE, SPLIT, {SPLIT: [2.0, 1.0], WHOLE: [4.0, 9.0], TORCH: [3.0]})
    worse = CaseResult(CASE, WHOLE, {SPLIT: [2.0], WHOLE: [3.0], TORCH: [6.0]})
    assert (best.regret(), best.against(split=True), best.against(split=False)) == (0.0, 1.0, 4.0)
    assert (worse.regret(), worse.against(split=True), worse.against(split=False)) == (0.5, 2 / 3, 1.0)
    found = summary([best, worse])
    assert found["largest regret"] == 0.5
    assert found["regret of the sum"] == pytest.approx(4 / 3 - 1)
    assert found["never splitting, geometric mean"] == pytest.approx(math.sqrt(4.0))
    assert CaseResult(CASE, TORCH, {TORCH: [1.0]}).against(split=True) is None


def test_the_grid_covers_requests_and_prefixes() -> None:
    grid = list(cases())
    assert {case.shared for case in grid} == set(PREFIXES)
    assert {case.requests for case in grid} >= {1, 64}
    assert all(case.context >= case.shared for case in grid)


@pytest.mark.skipif(native() is None, reason=why_not_native())
def test_a_step_is_measured_in_every_way() -> None:
    vector = np.array([float(name == "layer.merged") for name in NAMES])
    result = measure_case(CASE, CostModel({"native": vector}, {"native": vector}), repeats=2)
    assert result.chosen == WHOLE
    assert {way.implementation for way in result.seconds} >= {"native", "cpu"}
    assert len(result.seconds[WHOLE]) == 2
    assert all(seconds > 0 for samples in result.seconds.values() for seconds in samples)
