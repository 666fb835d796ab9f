"""Requests with adapters (LoRA) to an engine of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.lora.request import LoRARequest

from tests.engine.serving import Answer, Engine, answer_of, greedy_params


def ask(engine: Engine, asked: Sequence[tuple[Sequence[int], LoRARequest | None]], max_tokens: int) -> list[Answer]:
    """The answers to prompts, each with its adapter, all at once."""
    prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt, _ in asked]
    params = [greedy_params(max_tokens) for _ in asked]
    adapters: Any = [adapter for _, adapter in asked]
    return [answer_of(one) for one in engine.llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)]
