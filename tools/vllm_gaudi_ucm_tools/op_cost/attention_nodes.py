"""Counts the nodes of one layer's attention in a bucket, by the implementation for Gaudi, which determine its compile
time.
"""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, SelectedPart
from vllm_gaudi_ucm_tools.op_cost.node_count import NodeCount
from vllm_gaudi_ucm_tools.op_cost.row import META, bucket_parts, layer_nodes


def attention_nodes(shape: ForwardShape, limits: Limits, model: ModelSpec, most_rows: int = 1) -> NodeCount:
    """Returns the nodes of a layer's attention in a bucket, on `meta` tensors without fused kernels; see `layer_nodes`.

    Choosing the selected blocks is not included. most_rows: most rows of a request with chosen blocks.
    """
    parts = shape_parts(shape, limits, most_rows)
    return layer_nodes(parts, shape.query_len, limits.num_blocks, limits.block_size, model)


def shape_parts(shape: ForwardShape, limits: Limits, most_rows: int = 1) -> AttentionParts:
    """Returns the parts of a bucket, with selected blocks if it has some."""
    parts = bucket_parts(shape.with_selected(0), limits)
    if not shape.selected_blocks:
        return parts
    spans, blocks = (
        torch.empty(count, dtype=torch.int64, device=META) for count in (limits.max_num_seqs + 1, shape.selected_blocks)
    )
    return parts._replace(selected=SelectedPart(blocks, blocks, blocks, spans, spans, most_rows))
