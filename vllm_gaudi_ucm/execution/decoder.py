"""vLLM's model as a step uses it: token ids to hidden states, and these to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.graphs.runners.compiled import compile_static
from vllm_gaudi_ucm.vllm_api.model import set_forward_context

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DecoderModel(Protocol):
    """What a step needs of a vLLM model: token ids to hidden states [rows, hidden size], and these to logits."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: None, inputs_embeds: None
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None: ...


class Decoder:
    """A model with the context that its attention layers read."""

    def __init__(self, model: DecoderModel, vllm_config: VllmConfig) -> None:
        self.model = model
        self._forward: Callable[..., torch.Tensor] = model
        self._head = model.compute_logits
        self._vllm_config = vllm_config

    def compile(self, backend: str) -> None:
        """From now on forward and output head run compiled, once for each set of shapes."""
        # the context that layers read is set outside: entering it is no part of a graph
        self._forward = compile_static(self._forward, backend)
        self._head = compile_static(self._head, backend)

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: UnifiedAttentionMetadata | None
    ) -> torch.Tensor:
        """[rows, hidden size]. Without metadata nothing is attended (a memory measurement)."""
        with set_forward_context(metadata, self._vllm_config, num_tokens=len(token_ids), slot_mapping={}):
            return self._forward(
                input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]: what vLLM's sampler and grammar masks compute in."""
        logits = self._head(hidden)
        assert logits is not None, "a model on one device has all its logits"
        return logits.float()
