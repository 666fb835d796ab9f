"""Modelled device memory of a server: weights, KV cache, graphs, and the activations of its largest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_gaudi_ucm.graphs.cost.step_cost import CAUSAL_SLICE, PARTIAL_BYTES, CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape

# What vLLM leaves of a device's memory by default.
USABLE = 0.9
# Share of the usable memory that is kept for graphs and activations when the number of blocks is chosen.
WORKSPACE = 0.15


@dataclass(frozen=True)
class PlanMemory:
    """Bytes; every figure is modelled."""

    weights: float
    kv_cache: float
    graphs: float
    activations: float
    usable: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.graphs + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def plan_memory(buckets: BucketSet, cost: CostModel, tails: Sequence[ForwardShape] = ()) -> PlanMemory:
    """Memory of a server that warms all of `buckets` and the graphs for `tails`.

    Activations are shared by the graphs, as they run in turn.
    """
    m = cost.model
    return PlanMemory(
        weights=float(m.weight_bytes),
        kv_cache=float(buckets.limits.num_blocks * cost.block_size * m.kv_bytes_per_token),
        graphs=(buckets.num_graphs + len(tails)) * cost.device.graph_bytes,
        activations=max(activation_bytes(shape, cost) for shape in (*buckets.forward, *tails))
        + float(buckets.logits[-1] * m.vocab * PARTIAL_BYTES * 2),
        usable=USABLE * cost.device.memory,
    )


def activation_bytes(shape: ForwardShape, cost: CostModel) -> float:
    """The largest set of tensors alive at once in one layer: the MLP's, or the partials and scores of attention."""
    m = cost.model
    mlp = shape.query_len * (2 * m.hidden + m.mlp_matrices * m.intermediate) * m.dtype_bytes
    partials = 3 * shape.query_len * m.heads * (m.head_dim + 2) * PARTIAL_BYTES
    keys = max(
        min(shape.query_len, CAUSAL_SLICE) if "c" in shape.phase else 0, cost.block_size if shape.shared_blocks else 0
    )
    scores = shape.query_len * m.heads * keys * PARTIAL_BYTES
    per_block = (shape.unique_blocks + shape.selected_blocks) * m.heads * (m.head_dim + 2) * PARTIAL_BYTES
    return float(max(mlp, partials + scores + per_block))


def blocks_that_fit(cost: CostModel) -> int:
    """Blocks of KV cache beside the weights and a share for graphs and activations.

    Raises:
        ValueError: not even the weights fit.
    """
    free = USABLE * (1.0 - WORKSPACE) * cost.device.memory - cost.model.weight_bytes
    blocks = int(free // (cost.block_size * cost.model.kv_bytes_per_token))
    if blocks < 2:
        raise ValueError(
            f"--device {cost.device.name}: {cost.model.weight_bytes / 1e9:.1f} GB of weights leave no room for a KV "
            f"cache in {USABLE * cost.device.memory / 1e9:.0f} GB; one device cannot serve this model"
        )
    return blocks
