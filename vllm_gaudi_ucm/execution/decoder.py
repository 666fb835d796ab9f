"""vLLM's model as a step uses it: token ids to hidden states, these to logits, and what its attention layers read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.execution.regions import compile_regions
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.unified_attention.api import Plan, prepare
from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection
from vllm_gaudi_ucm.vllm_api.model import Attention, set_forward_context

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
    from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker

logger = plugin_logger(__name__)

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
        self._head = self._logits
        self._vllm_config = vllm_config

    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        return sum(isinstance(module, Attention) for module in cast(nn.Module, self.model).modules())

    def compile(self, compiler: StaticCompiler) -> None:
        """From now on layers and output head run compiled, once for each set of shapes.

        The model's own forward stays Python between its layers; where these cannot be compiled one by one, it is a
        region as a whole. The context that layers read is set outside: entering it is no part of a graph.
        """
        try:
            layers = compile_regions(cast(nn.Module, self.model), compiler)
        except ValueError as error:
            logger.warning(
                "%s is compiled as a whole, which takes longer the more layers it has: %s",
                type(self.model).__name__,
                error,
            )
            self._forward = compiler.region(self._run_model)
        else:
            logger.info("%d layers of %s are one compiled region", layers, type(self.model).__name__)
        self._head = compiler.region(self._head)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: StepMetadata | None) -> torch.Tensor:
        """[rows, hidden size]. Without metadata nothing is attended (a memory measurement)."""
        with set_forward_context(metadata, self._vllm_config, num_tokens=len(token_ids), slot_mapping={}):
            return self._forward(
                input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [rows, vocabulary], of some rows of the hidden states or of all: what vLLM's sampler and grammar
        masks compute in."""
        return self._head(hidden, rows)

    def _run_model(self, **inputs: torch.Tensor | None) -> torch.Tensor:
        return self.model(**inputs)  # type: ignore[arg-type]  # as `hidden` calls it

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        logits = self.model.compute_logits(hidden if rows is None else hidden.index_select(0, rows))
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
    plan: Plan | None = None,
) -> UnifiedAttentionMetadata:
    """Prepares a step's parts for the layers of one KV-cache group, for dense layers too where there are any.

    See UnifiedAttentionMetadata, LayerSelection and `prepare` for the arguments.
    """
    prepared = prepare(parts, block_size, implementation=implementation, plan=plan)
    choices = None
    if selection is not None:
        dense_parts = None
        if sparse is not None and sparse.has_dense_layers:
            whole = parts._replace(selected=selection.candidates_part(block_size))
            dense_parts = prepare(whole, block_size, implementation=implementation, plan=plan)
        choices = LayerSelection(selection, dense_parts, reused, at_once=prepared.implementation.name == "native")
    if sparse is None:
        return UnifiedAttentionMetadata(slots, prepared, summary_blocks=summary_blocks, selection=choices)
    return UnifiedAttentionMetadata(slots, prepared, sparse.method, summary_blocks, choices)
