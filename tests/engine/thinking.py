"""Helpers of `test_thinking_budget.py` that other tests use, too."""

from __future__ import annotations

from vllm.config import ReasoningConfig

START, END = [11, 12], [13]
FORCED = [21, 22, 13]
"""The model's own marker is the end of what the engine forces: some words, then the marker."""


def reasoning() -> ReasoningConfig:
    """The tokens of the markers, as a tokenizer would give them."""
    config = ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="that is enough</think>")
    config._reasoning_start_token_ids = START
    config._natural_reasoning_end_token_ids = END
    config._reasoning_end_token_ids = FORCED
    return config
