"""What ucm.attention.cost_model changes: which model is found, and what is chosen for a step by it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.config.ucm_config import AttentionConfig
from vllm_gaudi_ucm.execution import attention_choice
from vllm_gaudi_ucm.execution.attention_choice import AttentionChoice, find_model
from vllm_gaudi_ucm.execution.staging import reads_slice_by_bytes
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import NAMES, CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.grid import Step, make_parts
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import Facts, default_path, save_model
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way

CPU = torch.device("cpu")
SHAPE = LayerShape(4, 2, 16, 16, 4, layers=2)
PARTS = make_parts(Step(3, 2, 5, 2, 20), 16, torch.Generator().manual_seed(0))
DECODER: Any = None


def model(**features: dict[str, float]) -> CostModel:
    """Seconds by implementation and feature; zero for others, and measured for steps of any size."""
    vectors = {name: np.array([some.get(feature, 0.0) for feature in NAMES]) for name, some in features.items()}
    return CostModel(vectors, {name: np.full(len(NAMES), 1e18) for name in vectors})


MERGING_IS_DEAR = model(native={"layer.merged": 1.0}, cpu={"layer.one": 1e9})
LOADING_IS_DEAR = model(native={"layer.loaded": 1.0}, cpu={"layer.one": 1e9})
CPU_IS_FAST = model(native={"layer.one": 1.0}, cpu={"layer.one": 0.5})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("found", "implementations", "way"),
    [
        (MERGING_IS_DEAR, ("native", "cpu"), Way("native", frozenset({0}))),
        (LOADING_IS_DEAR, ("native", "cpu"), Way("native")),
        (CPU_IS_FAST, ("native", "cpu"), Way("cpu")),
        (CPU_IS_FAST, ("native",), Way("native")),
    ],
)
def test_way_of_a_step(found: CostModel, implementations: tuple[str, ...], way: Way) -> None:
    """covers: A20"""
    choice = AttentionChoice(found, SHAPE, 16, implementations)
    assert choice.way(PARTS) == way
    assert choice.way(PARTS) == way


def test_the_choice_follows_the_step() -> None:
    choice = AttentionChoice(MERGING_IS_DEAR, SHAPE, 16, ("native",))
    alone = make_parts(Step(3, 0, 0, 0, 20), 16, torch.Generator().manual_seed(0))
    assert [len(choice.way(parts).unsplit) for parts in (PARTS, alone, PARTS)] == [1, 0, 1]


def test_slices_by_the_implementation_in_use() -> None:
    """covers: A15"""
    gathers_slowly = model(cpu={"layer.gathered": 1.0}, native={"layer.one": 1e9})
    choice = AttentionChoice(gathers_slowly, SHAPE, 16, ("native", "cpu"))
    assert not choice.reads_slice(100, 1)  # native, for which there is no difference
    choice.way(PARTS)
    assert choice.reads_slice(100, 1)
    assert not reads_slice_by_bytes(100, 1)


@pytest.mark.skipif(native() is None, reason=why_not_native())
@pytest.mark.parametrize(("found", "slices", "unsplit"), [(MERGING_IS_DEAR, False, True), (None, True, False)])
def test_a_step_is_staged_in_the_chosen_way(found: CostModel | None, slices: bool, unsplit: bool) -> None:
    """The fixed rules without a model: splitting, and a slice of three blocks for two in use."""
    choice = None if found is None else AttentionChoice(found, SHAPE, 16, ("native",))
    execution = TrueShapeExecution(DECODER, AttentionConfig(implementation="native"), 16, CPU, choice=choice)
    computed, new = np.array([33, 35], np.int32), np.ones(2, np.int32)
    plan = plan_batch(BatchInput(computed, new, computed + new, np.array([[9, 8, 1], [9, 8, 2]], np.int32)), 16)
    execution.stage(plan, np.zeros(plan.num_rows, np.int64))
    prepared = execution._metadata.parts
    assert (prepared.parts.unique.blocks is None) is slices  # type: ignore[union-attr]
    assert (prepared.plan.jobs.partials == 0) is unsplit  # type: ignore[union-attr]


def test_no_fit_in_the_cache(home: Path) -> None:
    assert find_model("auto", CPU) is None


def test_a_fit_in_the_cache_is_used_unless_off(home: Path) -> None:
    facts = Facts.of(CPU)
    save_model(default_path(facts), MERGING_IS_DEAR, facts, {})
    found = find_model("auto", CPU)
    assert found is not None
    assert found.to_json() == MERGING_IS_DEAR.to_json()
    assert find_model("off", CPU) is None
    assert find_model("auto", CPU, threads=facts.threads + 1) is None


def test_a_broken_fit_in_the_cache_is_ignored_with_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """covers: D10"""
    path = default_path(Facts.of(CPU))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    attention_choice.logger.propagate = True
    with caplog.at_level(logging.WARNING):
        logging.getLogger("vllm").addHandler(caplog.handler)
        try:
            assert find_model("auto", CPU) is None
        finally:
            logging.getLogger("vllm").removeHandler(caplog.handler)
    assert f"fixed rules instead of what was fitted: {path}" in caplog.text


def test_a_file_that_is_named_has_to_be_usable(tmp_path: Path) -> None:
    """covers: A18"""
    with pytest.raises(ValueError, match=r"ucm.attention.cost_model: .*No such file.*fit-attention -o FILE"):
        find_model(tmp_path / "none.json", CPU)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ucm.attention.cost_model: .*bad.json: expected an object"):
        find_model(tmp_path / "bad.json", CPU)
    with pytest.raises(ValueError, match=r"ucm.attention.cost_model: found '.*' with device hpu"):
        find_model(tmp_path / "bad.json", torch.device("hpu"))
    assert find_model("auto", torch.device("hpu")) is None
