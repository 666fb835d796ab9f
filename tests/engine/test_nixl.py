"""vLLM's NixlConnector with keys and values in two regions: prompts of one engine, decoded by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES
from tests.engine.nixl_pair import decode, finish_steps, new_side_channel, nixl, prefill
from tests.engine.serving import Answer, Engine, assert_same

pytest.importorskip("nixl", reason="the package nixl is not installed")
pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 8


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@SHAPES
def test_tokens_after_blocks_of_another_engine(
    tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch, ucm: dict[str, Any]
) -> None:
    """The second engine computes the last token of a prompt alone, and the first one gets its blocks back."""
    new_side_channel(monkeypatch)
    with Engine(tiny_llama, ucm, kv_transfer_config=nixl("kv_producer"), **OPTIONS) as first:
        new_side_channel(monkeypatch)
        with Engine(tiny_llama, ucm, kv_transfer_config=nixl("kv_consumer"), **OPTIONS) as second:
            found = []
            for prompt in PROMPTS:
                # other bytes than zeros where blocks are to arrive
                second.poison()
                second.llm.reset_prefix_cache()
                found.append(decode(second, prompt, prefill(first, prompt), OUTPUTS, first))
            second.check_idle()
            finish_steps(first)
    assert_same(found, expected)
    assert [answer.cached_tokens for answer in found] == [len(prompt) - 1 for prompt in PROMPTS]
