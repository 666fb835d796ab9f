"""Grammars of requests, as vLLM compiles them: what may follow, for the check of an answer."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.structured_output.request import get_structured_output_key

from tests.fuzz.answer_check import Grammar


class CompiledGrammar:
    """A grammar at the start of an answer."""

    def __init__(self, backend: Any, grammar: Any, vocabulary: int) -> None:
        self._grammar, self._vocabulary = grammar, vocabulary
        self._mask = backend.allocate_token_bitmask(1)

    def allowed(self) -> torch.Tensor:
        self._grammar.fill_bitmask(self._mask, 0)
        words = self._mask[0].to(torch.int64) & 0xFFFFFFFF
        bits = words[:, None] >> torch.arange(32) & 1
        return bits.flatten()[: self._vocabulary].bool()

    def accept(self, token: int) -> bool:
        return bool(self._grammar.accept_tokens("check", [token]))


class Grammars:
    """Compiles with the backend of an engine.

    Args:
        manager: vLLM's `StructuredOutputManager`.
        vocabulary: tokens of the model.
    """

    def __init__(self, manager: Any, vocabulary: int) -> None:
        self._manager, self._vocabulary = manager, vocabulary

    def __call__(self, params: SamplingParams) -> Grammar | None:
        """A new grammar of a request; None if it has none."""
        backend = self._manager.backend
        if params.structured_outputs is None or backend is None:
            return None
        kind, text = get_structured_output_key(params.structured_outputs)
        grammar = backend.compile_grammar(kind, text, stop_token_ids=params.all_stop_token_ids)
        return CompiledGrammar(backend, grammar, self._vocabulary)
