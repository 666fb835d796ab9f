"""Prompts of an engine on a CPU, decoded on a simulated Gaudi: NIXL reads into buffers on its host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.any_connector import OPTIONS, PROMPTS, STATIC
from tests.engine.hpu_process import run_on_card
from tests.engine.nixl_pair import decode, new_side_channel, nixl, prefill
from tests.engine.serving import Answer, Engine, assert_same
from vllm_gaudi_ucm.device import get_device

pytest.importorskip("nixl", reason="the package nixl is not installed")
pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 4


def decode_on_card(model: str, transfers: list[dict[str, Any]]) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        new_side_channel(patch)
        with Engine(Path(model), STATIC, kv_transfer_config=nixl("kv_consumer"), **OPTIONS) as engine:
            engine.poison()
            compiled = [get_device("hpu").compilations()]
            found = []
            for pair in zip(PROMPTS, transfers, strict=True):
                found.append(decode(engine, *pair, OUTPUTS))
                compiled.append(get_device("hpu").compilations())
            assert len(set(compiled)) == 1, f"recipes compiled so far, after each request: {compiled}"
            engine.check_idle()
    return [[one.answer.tokens, one.answer.logprobs, one.computed] for one in found]


def test_prompts_of_another_kind_of_device(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_side_channel(monkeypatch)
    with Engine(tiny_llama, kv_transfer_config=nixl("kv_producer"), **OPTIONS) as first:
        transfers = [prefill(first, prompt) for prompt in PROMPTS]
        finished = run_on_card(decode_on_card, tmp_path, model=str(tiny_llama), transfers=transfers)
        first.llm.reset_prefix_cache()
        expected = first.alone(PROMPTS, OUTPUTS)
    found = [Answer(tokens, logprobs, [], 0) for tokens, logprobs, _ in finished.result]
    assert_same(found, expected)
    assert [computed for *_, computed in finished.result] == [OUTPUTS] * len(PROMPTS)
