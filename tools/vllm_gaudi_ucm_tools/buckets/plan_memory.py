"""The memory of a plan: weights, what requests and pictures hold, KV cache, graphs, activations; all modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_gaudi_ucm.decisions.step_memory import step_bytes
from vllm_gaudi_ucm.graphs.cost.step_cost import CAUSAL_SLICE, PARTIAL_BYTES, CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm_tools.buckets.encoder_plan import EncoderPlan
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS

# The fraction of a device's memory that vLLM uses by default.
USABLE = 0.9
# Share of the usable memory that is kept for graphs and activations when the number of blocks is chosen.
WORKSPACE = 0.15
# Device memory of one captured graph, without its activations. vllm-gaudi, issue 1736: 300 buckets need 20 to 30 GiB
# while they are compiled.
GRAPH_BYTES = {"gaudi2": 85e6, "gaudi3": 85e6, "h200": 8e6, "cpu": 0.0}


NO_PICTURES = EncoderPlan()


@dataclass(frozen=True)
class PlanMemory:
    """Memory in bytes; every figure is modelled."""

    weights: float
    kv_cache: float
    graphs: float
    activations: float
    usable: float
    adapters: float = 0.0
    states: float = 0.0
    encoder: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.weights + self.adapters + self.states + self.encoder + self.kv_cache + self.graphs + self.activations
        )

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def plan_memory(
    buckets: BucketSet,
    cost: CostModel,
    weights: int,
    remainders: Sequence[ForwardShape] = (),
    *,
    adapters: int = 0,
    states: int = 0,
    encoder: EncoderPlan = NO_PICTURES,
    pools: bool = False,
) -> PlanMemory:
    """Plans the memory of a server that warms all of `buckets` and the graphs for `remainders`. weights, adapters,
    states: their bytes. encoder: of pictures. pools: the model computes no logits.

    Graphs share activations, because they run in turn.
    """
    m, limits = cost.model, buckets.limits
    # the dummy block alone is no cache
    blocks = limits.num_blocks if limits.has_cache else 0
    logits = 0 if pools else buckets.logits[-1]
    num_graphs = buckets.num_graphs - (len(buckets.logits) if pools else 0)
    return PlanMemory(
        weights=float(weights),
        adapters=float(adapters),
        states=float(states),
        encoder=float(encoder.held),
        kv_cache=float(blocks * cost.block_size * m.kv_bytes_per_token),
        graphs=(num_graphs + len(remainders) + encoder.graphs) * GRAPH_BYTES[cost.device.name],
        # the encoder runs between steps
        activations=max(
            encoder.activations, *(activation_bytes(shape, cost) for shape in (*buckets.forward, *remainders))
        )
        + float(logits * m.vocab * m.tensor * PARTIAL_BYTES * 2),
        usable=USABLE * cost.device.memory,
    )


def activation_bytes(shape: ForwardShape, cost: CostModel) -> float:
    """Returns the size of the largest set of tensors alive at once in one layer: the MLP's, or the partials and scores
    of attention.
    """
    m = cost.model
    mlp = shape.query_len * (2 * m.hidden + m.mlp_activations) * m.dtype_bytes
    return float(max(mlp, attention_bytes(shape, cost)))


def attention_bytes(shape: ForwardShape, cost: CostModel) -> float:
    """Returns the bytes of attention for Gaudi, or for an implementation that computes a slice of new tokens, and a
    block, at a time.
    """
    m = cost.model
    if cost.device.name in CHIPS:
        return float(step_bytes(shape, m, cost.block_size))
    partials = 3 * shape.query_len * m.heads * (m.value_dim + 2) * PARTIAL_BYTES
    keys = max(
        min(shape.query_len, CAUSAL_SLICE) if "c" in shape.phase else 0, cost.block_size if shape.shared_blocks else 0
    )
    scores = shape.query_len * m.heads * keys * PARTIAL_BYTES
    per_block = (shape.unique_blocks + shape.selected_blocks) * m.heads * (m.value_dim + 2) * PARTIAL_BYTES
    return float(partials + scores + per_block)


def blocks_that_fit(cost: CostModel, weights: int) -> int:
    """Returns the number of KV-cache blocks that fit with weights of this many bytes and a share for graphs and
    activations.

    Raises:
        ValueError: the weights alone do not fit.
    """
    free = USABLE * (1.0 - WORKSPACE) * cost.device.memory - weights
    blocks = int(free // (cost.block_size * cost.model.kv_bytes_per_token))
    if blocks < 2:
        raise ValueError(
            f"--device {cost.device.name}: {weights / 1e9:.1f} GB of weights leave no room for a KV "
            f"cache in {USABLE * cost.device.memory / 1e9:.0f} GB; one device cannot serve this model; "
            "have more of them share it, with --tensor-parallel-size"
        )
    return blocks
