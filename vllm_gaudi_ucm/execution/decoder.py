"""vLLM's model as a step uses it: token ids to hidden states, these to logits, and what its attention layers read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.graphs.runners.compiled import compile_static
from vllm_gaudi_ucm.ops.unified_attention.api import prepare
from vllm_gaudi_ucm.sparse.selection.block_selector import LayerSelection
from vllm_gaudi_ucm.vllm_api.model import set_forward_context

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
    from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


StepMetadata = UnifiedAttentionMetadata | dict[str, UnifiedAttentionMetadata]
"""Attention of one step: of all layers in one KV-cache group, or by layer name, each with that of its group."""


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

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: StepMetadata | None) -> torch.Tensor:
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


def step_metadata(
    slots: torch.Tensor,
    parts: AttentionParts,
    block_size: int,
    implementation: str,
    sparse: SparseWorker | None,
    summary_blocks: torch.Tensor | None = None,
    selection: SelectionTensors | None = None,
    *,
    reused: bool = False,
) -> UnifiedAttentionMetadata:
    """Prepares a step's parts for the layers of one KV-cache group, for dense layers too where there are any.

    See UnifiedAttentionMetadata, LayerSelection and `prepare` for the arguments.
    """
    prepared = prepare(parts, block_size, implementation=implementation)
    choices = None
    if selection is not None:
        dense_parts = None
        if sparse is not None and sparse.has_dense_layers:
            whole = parts._replace(selected=selection.candidates_part(block_size))
            dense_parts = prepare(whole, block_size, implementation=implementation)
        choices = LayerSelection(selection, dense_parts, reused, at_once=prepared.implementation.name == "native")
    if sparse is None:
        return UnifiedAttentionMetadata(slots, prepared, summary_blocks=summary_blocks, selection=choices)
    return UnifiedAttentionMetadata(slots, prepared, sparse.method, summary_blocks, choices, sparse.selector)
