"""Calls that an engine refuses, and those that it answers, between requests that get their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Engine
from vllm_gaudi_ucm.platform.refused_calls import REFUSED, UnsupportedCallError

PROMPT = [5, 6, 7, 8]


def test_the_engine_goes_on(tiny_llama: Path) -> None:
    """vLLM pauses an engine before it asks the worker to give back memory: `wake_up` lets it go on all the same."""
    with Engine(tiny_llama) as engine:
        before = engine.greedy([PROMPT], 4)

        def same_as_before() -> bool:
            return engine.greedy([PROMPT], 4)[0].tokens == before[0].tokens

        for call in REFUSED:
            with pytest.raises(UnsupportedCallError, match=f"the call {call}"):
                engine.llm.collective_rpc(call)
        assert same_as_before()
        # the worker learns that the last request has ended
        engine.step()
        engine.llm.sleep(0)
        with pytest.raises(UnsupportedCallError, match="discard"):
            engine.llm.release_kv_cache_memory()
        assert engine.llm.wake_up()
        assert same_as_before()


def test_answered_calls(tiny_llama: Path) -> None:
    with Engine(tiny_llama, block_size=16) as engine:

        def ask(call: str, *arguments: Any) -> Any:
            (answer,) = engine.llm.collective_rpc(call, args=arguments)
            return answer

        # keys and values of 2 layers, 2 heads of 16 elements, float32
        assert ask("get_cache_block_size_bytes") == 2 * 2 * 2 * 16 * 4 * 16
        for call, answer in {
            "check_health": None,
            "list_loras": set(),
            "get_draft_model": None,
            "get_compilation_match_table": {},
            "get_encoder_timing_stats": {},
            "supports_draft_weight_updates": False,
            "reset_encoder_cache": None,
            "reset_mm_cache": None,
            "wake_up": None,
        }.items():
            assert ask(call) == answer
        with pytest.raises(UnsupportedCallError, match="start the engine with --enable-lora"):
            ask("remove_lora", 1)
        assert "LlamaForCausalLM" in ask("get_model_inspection")
        assert engine.llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
