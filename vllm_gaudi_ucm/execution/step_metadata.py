"""What the attention layers of a step read, with a sparse method and without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.ops.unified_attention.api import prepare
from vllm_gaudi_ucm.sparse.selection.block_selector import LayerSelection
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker


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
    """Prepares the parts of a step, for dense layers too where there are any.

    See UnifiedAttentionMetadata, LayerSelection and `prepare` for the arguments.
    """
    prepared = prepare(parts, block_size, implementation=implementation)
    choices = None
    if selection is not None:
        dense_parts = None
        if sparse is not None and sparse.has_dense_layers:
            whole = parts._replace(selected=selection.candidates_part(block_size))
            dense_parts = prepare(whole, block_size, implementation=implementation)
        choices = LayerSelection(selection, dense_parts, reused, at_once=prepared.implementation == "native")
    if sparse is None:
        return UnifiedAttentionMetadata(slots, prepared, summary_blocks=summary_blocks, selection=choices)
    return UnifiedAttentionMetadata(slots, prepared, sparse.method, summary_blocks, choices, sparse.selector)
