"""What the layers of a forward read of their step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.unified_attention.api import Plan, prepare
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection

if TYPE_CHECKING:
    from vllm_gaudi_ucm.attention.latent import LatentSizes
    from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker

StepMetadata = UnifiedAttentionMetadata | GroupedMetadata
"""What layers read: of one KV-cache group, or of each."""


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
    room: torch.Tensor | None = None,
    latent: LatentSizes | None = None,
) -> UnifiedAttentionMetadata:
    """Prepares a step's parts for the layers of one KV-cache group, for dense layers too where there are any.

    latent: where all of them are of latent attention. See UnifiedAttentionMetadata, LayerSelection and `prepare` for
    the other arguments.
    """
    new_tokens = None
    if latent is not None and sparse is None and latent.divides(parts):
        new_tokens = prepare(AttentionParts(parts.causal), block_size, implementation=implementation, plan=plan)
        if new_tokens.implementation.gives_log_sums:
            parts = parts._replace(causal=None)
        else:
            new_tokens = None
    prepared = prepare(parts, block_size, implementation=implementation, plan=plan)
    choices = None
    if selection is not None:
        dense_parts = None
        if sparse is not None and sparse.has_dense_layers:
            whole = parts._replace(selected=selection.candidates_part(block_size))
            dense_parts = prepare(whole, block_size, implementation=implementation, plan=plan)
        name = AUTO if sparse is None else sparse.implementation
        at_once = prepared.implementation.name == "native" and name in ("native", AUTO)
        choices = LayerSelection(
            selection, dense_parts, reused, at_once, room=room, implementation=name, parts=prepared
        )
    # layers that have nothing to summarise or choose are those of a dense server, and as fast
    if sparse is None or (choices is None and summary_blocks is None and not sparse.watches_layers):
        return UnifiedAttentionMetadata(slots, prepared, None, summary_blocks, choices, new_tokens)
    return UnifiedAttentionMetadata(slots, prepared, sparse.method, summary_blocks, choices)
