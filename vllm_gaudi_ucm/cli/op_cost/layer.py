"""The operator stream of one attention layer, at the shapes of a step or of a bucket; nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.cli.op_cost.kernels import kernels_of
from vllm_gaudi_ucm.execution.staging import Staging
from vllm_gaudi_ucm.execution.static_inputs import StaticInputs
from vllm_gaudi_ucm.graphs.cost.device_figures import device_figures
from vllm_gaudi_ucm.graphs.cost.model_figures import ModelFigures
from vllm_gaudi_ucm.graphs.operator_cost.operator_trace import OperatorTrace, trace
from vllm_gaudi_ucm.graphs.operator_cost.stream_cost import CHIPS, StreamCost
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

IMPLEMENTATIONS = ("reference", "hpu")
CAUSAL_SLICE = 512
META = torch.device("meta")


@dataclass(frozen=True)
class LayerCost:
    """A stream on both cards: what it costs, by device."""

    by_device: dict[str, StreamCost]

    @property
    def flops(self) -> float:
        return self.by_device["gaudi2"].work.flops

    def bytes(self, device: str) -> float:
        """To and from the device's memory."""
        return self.by_device[device].work.bytes

    def seconds(self, device: str) -> float:
        """Modelled."""
        return self.by_device[device].work.seconds(device_figures(device))

    @classmethod
    def of(cls, streams: Mapping[str, OperatorTrace]) -> LayerCost:
        """The operators of each card, with as much on the chip as it has."""
        return cls({name: StreamCost.of(streams[name], chip.on_chip) for name, chip in CHIPS.items()})


def step_parts(plan: UnifiedPlan) -> AttentionParts:
    """A step at its true shape."""
    return Staging(META, False).stage(plan, np.zeros(plan.num_rows, np.int64)).parts


def bucket_parts(shape: ForwardShape, limits: Limits) -> AttentionParts:
    """A bucket, whatever step runs in it."""
    inputs = StaticInputs(limits.dense, CAUSAL_SLICE, META)
    return inputs.split(inputs.fill_pads(shape), shape).parts


def layer_cost(
    parts: AttentionParts, rows: int, num_blocks: int, block_size: int, model: ModelFigures, implementation: str
) -> LayerCost:
    """The cost of attention in one layer, with the fused kernels of each card.

    rows: of the flat batch. num_blocks: of the KV cache.
    """
    dtype = torch.float32 if model.dtype_bytes == 4 else torch.bfloat16

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, model.head_dim, dtype=dtype, device=META)

    query, out = tensor(rows, model.heads), tensor(rows, model.heads)
    key, value = tensor(rows, model.kv_heads), tensor(rows, model.kv_heads)
    caches = [tensor(num_blocks, block_size, model.kv_heads) for _ in range(2)]
    ready = prepare(parts, block_size, implementation=implementation)

    def stream() -> OperatorTrace:
        return trace(unified_attention, query, key, value, *caches, ready, model.head_dim**-0.5, out)

    if implementation != "hpu":
        return LayerCost.of(dict.fromkeys(CHIPS, stream()))
    streams = {}
    for name in CHIPS:
        with kernels_of(name):
            streams[name] = stream()
    return LayerCost.of(streams)
