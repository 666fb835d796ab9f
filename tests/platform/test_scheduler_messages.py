"""The form of the scheduler's messages: one on every device, unless the user asks for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.envs import disable_envs_cache

from tests.engine.contracts import SWITCH
from tests.platform.features import save_config, start


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_config(tmp_path, "LlamaForCausalLM", "llama")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As where Triton has a driver; and what this process sets of the environment is put back."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.delenv(SWITCH)
    disable_envs_cache()
    return monkeypatch


def drafted(model: Path, **options: Any) -> VllmConfig:
    """With a draft model whose context is shorter."""
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2, "max_model_len": 64}
    config: VllmConfig = start(model, max_model_len=256, speculative_config=draft, **options)
    return config


@pytest.mark.parametrize(("asked", "is_v2"), [(None, False), ("0", False), ("1", True)])
def test_v1_unless_the_user_asks(triton: pytest.MonkeyPatch, model: Path, asked: str | None, is_v2: bool) -> None:
    if asked is not None:
        triton.setenv(SWITCH, asked)
    assert start(model).use_v2_model_runner is is_v2


def test_a_draft_models_shorter_context_bounds_no_request(triton: pytest.MonkeyPatch, model: Path) -> None:
    """A request that outgrows it goes on without drafts; vLLM 0.33 would lower `max_model_len` for its V2 runner."""
    config = drafted(model)
    assert config.model_config.max_model_len == 256
    assert config.speculative_config is not None
    assert config.speculative_config.draft_model_config.max_model_len == 64
