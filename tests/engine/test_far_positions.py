"""`--max-model-len` beyond a model's positions: longer rotary tables, or a refusal when the engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

OWN, ASKED = 128, 300
LONG = [(7 * place) % 250 + 3 for place in range(200)]
SHORT = LONG[:20]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.fixture(autouse=True)
def _longer_than_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable vLLM refuses such a length itself."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")


def made(folder: Path, family: str, **changes: Any) -> Path:
    key = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return make_model(folder, make_config(family, **{key: OWN, **changes}))


@pytest.mark.parametrize(("family", "rope"), [("llama", None), ("llama", LLAMA3), ("deepseek_v2", None)])
@pytest.mark.parametrize("mode", ["off", "eager"])
def test_angles_that_go_on_are_those_of_transformers(
    tmp_path: Path, family: str, rope: dict[str, Any] | None, mode: str
) -> None:
    model = made(tmp_path, family, **({} if rope is None else {"rope_parameters": rope}))
    ucm = {"graphs": {"mode": mode, "warm_up": "skeleton"}}
    with Engine(model, ucm, max_model_len=ASKED, max_num_batched_tokens=64) as engine:
        answers = engine.greedy([LONG, SHORT], 16)
    ReferenceModel(model).assert_greedy([LONG, SHORT], answers)


@pytest.mark.parametrize(
    ("family", "changes", "ends"),
    [
        ("opt", {}, OWN),
        ("gpt2", {}, OWN),
        ("llama", {"rope_parameters": YARN}, OWN),
        ("llama", {"rope_parameters": LINEAR}, 2 * OWN),
    ],
)
def test_positions_that_end_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], ends: int) -> None:
    model = made(tmp_path, family, **changes)
    learned = f"positions beyond the model's {ends} .*--max-model-len"
    scaled = f"--max-model-len: found {ASKED}, expected at most {ends}: {model} .*layer"
    with pytest.raises((UnsupportedFeatureError, ValueError), match=scaled if changes else learned):
        Engine(model, max_model_len=ASKED)
    with Engine(model, max_model_len=ends) as engine:
        assert len(engine.greedy([LONG[: ends - 8]], 8)[0].tokens) == 8


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_table_of_learned_positions_is_measured(tmp_path: Path, family: str) -> None:
    """Where a configuration does not say that its positions are learned."""
    model = made(tmp_path, family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"position_embedding_type": "alibi"}))
    with pytest.raises(ValueError, match=rf"--max-model-len: found {ASKED}, expected at most {OWN}: .*layer"):
        Engine(model, max_model_len=ASKED)


def test_a_draft_model_with_fewer_positions(tmp_path: Path) -> None:
    """It drafts as far as its own positions go, and the long request is served."""
    model, draft = made(tmp_path / "model", "llama"), made(tmp_path / "draft", "opt", max_position_embeddings=64)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with Engine(model, max_model_len=ASKED, speculative_config=speculation) as engine:
        answers = engine.greedy([LONG, SHORT, LONG[:50]], 24)
    ReferenceModel(model).assert_greedy([LONG, SHORT, LONG[:50]], answers)


def test_a_draft_model_that_is_asked_for_more(tmp_path: Path) -> None:
    model, draft = made(tmp_path / "model", "llama"), made(tmp_path / "draft", "opt", max_position_embeddings=64)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2, "max_model_len": 100}
    with pytest.raises((UnsupportedFeatureError, ValueError), match="64"):
        Engine(model, max_model_len=ASKED, speculative_config=speculation)
