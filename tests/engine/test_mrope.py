"""The text part of models whose rotary positions have three axes gives the tokens of Transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.families import prompts
from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.batch.mrope_positions import MropePositions

pytest.importorskip("torchvision")  # vLLM's classes import it
from tests.engine.qwen_vl_models import BUCKETS, IMAGE, MODELS, WAYS, PictureReference, make_qwen, qwen_config

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [[min(token, IMAGE - 1) for token in prompt] for prompt in prompts()]
LENGTH = 40
TEXT: dict[str, Any] = {"language_model_only": True}
# chunks, and preempted requests
TIGHT: dict[str, Any] = {
    **TEXT,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "num_gpu_blocks_override": 20,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp(request.param), qwen_config(request.param))


@pytest.fixture(scope="module")
def qwen2_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen2_5"), qwen_config("qwen2_5_vl"))


@WAYS
def test_chunks_and_preemptions(model: Path, ucm: dict[str, Any], options: dict[str, Any]) -> None:
    with Engine(model, ucm, **TIGHT, **options) as engine:
        assert MropePositions in engine.runner.decoder.inputs
        found = engine.greedy(PROMPTS, LENGTH)
        assert options or engine.preemptions
        engine.step()
        engine.check_idle()
    PictureReference(model).assert_greedy(PROMPTS, found)


def test_two_stages(qwen2_5: Path) -> None:
    """Each stage computes the positions of a request by itself."""
    with EngineOfWorkers(qwen2_5, BUCKETS, **TIGHT, pipeline_parallel_size=2) as engine:
        found = engine.greedy(PROMPTS, LENGTH)
        assert engine.most_in_flight == 2
    PictureReference(qwen2_5).assert_greedy(PROMPTS, found)


def serve(model: str) -> dict[str, Any]:
    """Answers of an engine on the simulated card, and what it compiled once it was warm."""
    from habana_frameworks.torch.simulator import card

    options = {**TEXT, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
    with Engine(Path(model), {"graphs": {"warm_up": "full", "max_graphs": 4}}, **options) as engine:
        before = card.compilations
        answers = engine.greedy(PROMPTS, 8)
        return {
            "answers": [dataclasses.asdict(answer) for answer in answers],
            "compiled": card.compilations - before,
            "broken": broken_duties(),
        }


def test_on_the_simulated_card(qwen2_5: Path, tmp_path: Path) -> None:
    found = run_on_card(serve, tmp_path, model=str(qwen2_5)).result
    PictureReference(qwen2_5).assert_greedy(PROMPTS, [Answer(**answer) for answer in found["answers"]])
    assert found["compiled"] == 0
    assert found["broken"] == {}
