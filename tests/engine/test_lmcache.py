"""vLLM's LMCacheConnectorV1 with copies of pairs: prompts come back from LMCache's memory and disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES
from tests.engine.lmcache_engine import alone, forget_options
from tests.engine.serving import Answer, Engine, assert_same

pytest.importorskip("lmcache", reason="the package lmcache is not installed")
pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 8
CHUNK = 32


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@pytest.fixture(autouse=True)
def _own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_options(monkeypatch)


@SHAPES
def test_prompts_from_its_memory(tiny_llama: Path, expected: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(tiny_llama, ucm, kv_transfer_config=alone(), **OPTIONS) as engine:
        assert_same(engine.alone(PROMPTS, OUTPUTS), expected)
        engine.poison()
        engine.llm.reset_prefix_cache()
        again = engine.alone(PROMPTS, OUTPUTS)
        engine.check_idle()
    assert_same(again, expected)
    assert [answer.cached_tokens for answer in again] == [len(prompt) // CHUNK * CHUNK for prompt in PROMPTS]
