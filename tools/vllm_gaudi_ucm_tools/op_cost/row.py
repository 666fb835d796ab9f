"""One line of `gaudi-ucm op-cost`: a layer's attention by one implementation, compared with the least that the step
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm_tools.op_cost.batch import Batch
from vllm_gaudi_ucm_tools.op_cost.node_count import NodeCount, count_nodes
from vllm_gaudi_ucm_tools.op_cost.operator_cost import VECTOR_WORK, OperatorTrace, StreamCost, trace
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS, Work, full_work, least_work

SOFTMAX_OPERATIONS = 4

_library = torch.library.Library("gaudi_ucm_op_cost", "DEF")
_library.define("fused_sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal) -> Tensor")


@contextmanager
def fused_kernel() -> Iterator[None]:
    """While it is entered, the hpu implementation finds the fused kernel of a card."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import kernels

    with patch.object(kernels, "FUSED_SDPA", _sdpa):
        yield


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False, *_: Any
) -> Tensor:
    """Like `FusedSDPA.apply` is called."""
    result: Tensor = torch.ops.gaudi_ucm_op_cost.fused_sdpa(q, k, v, mask, causal)
    return result


def _sdpa_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


_library.impl("fused_sdpa", _sdpa_shape, "Meta")


@register_flop_formula(torch.ops.gaudi_ucm_op_cost.fused_sdpa)
def _sdpa_flops(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, out_shape: Any = None, **_: Any) -> int:
    """Returns the FLOPs for shapes [batch, heads, rows, dim], [batch, kv_heads, keys, dim]."""
    batch, heads, rows, dim = q
    return int(2 * batch * heads * rows * k[2] * (dim + v[3])) // (2 if is_causal else 1)


def _sdpa_vector(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> float:
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (2 if is_causal else 1)
    return float(scores * (SOFTMAX_OPERATIONS + (mask is not None)))


VECTOR_WORK[torch.ops.gaudi_ucm_op_cost.fused_sdpa] = _sdpa_vector


IMPLEMENTATIONS = ("reference", "hpu")
CAUSAL_SLICE = 512
META = torch.device("meta")


@dataclass(frozen=True)
class LayerCost:
    """The cost of a stream of operators, by device."""

    by_device: dict[str, StreamCost]

    @property
    def flops(self) -> float:
        return self.by_device["gaudi2"].work.flops

    def bytes(self, device: str) -> float:
        """Returns the bytes to and from the device's memory."""
        return self.by_device[device].work.bytes

    def seconds(self, device: str) -> float:
        """Modelled."""
        return self.by_device[device].work.seconds(device_spec(device))

    @classmethod
    def from_stream(cls, stream: OperatorTrace) -> LayerCost:
        """Computes the cost on each card, with the on-chip memory that it has."""
        return cls({name: StreamCost.from_trace(stream, chip.on_chip) for name, chip in CHIPS.items()})


def step_parts(plan: UnifiedPlan) -> AttentionParts:
    """A step at its true shape."""
    return TrueShapeTensors(META, False).stage(PlannedStep.of_tokens(plan, np.zeros(plan.num_rows, np.int64)))[0].parts


def bucket_parts(shape: ForwardShape, limits: Limits) -> AttentionParts:
    """A bucket, which is the same for every step in it."""
    inputs = BucketTensors(limits.dense, CAUSAL_SLICE, META)
    return inputs.split(inputs.fill_pads(shape), shape).parts


class LayerTensors(NamedTuple):
    """The tensors that one layer's attention reads and writes, without memory."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor

    @classmethod
    def from_sizes(cls, rows: int, num_blocks: int, block_size: int, model: ModelSpec) -> LayerTensors:
        """rows: of the flat batch. num_blocks: of the KV cache."""
        dtype = torch.float32 if model.dtype_bytes == 4 else torch.bfloat16

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        size, value_size = model.head_dim, model.value_dim
        query, out = empty(rows, model.heads, size), empty(rows, model.heads, value_size)
        new, cached = (rows, model.kv_heads), (num_blocks, block_size, model.kv_heads)
        key, key_cache = empty(*new, size), empty(*cached, size)
        if model.latent is not None:
            return cls(query, key, key[..., :value_size], key_cache, key_cache[..., :value_size], out)
        return cls(query, key, empty(*new, value_size), key_cache, empty(*cached, value_size), out)


def _spec(model: ModelSpec) -> AttentionSpec:
    return AttentionSpec(model.head_dim**-0.5, values_in_keys=model.latent is not None)


def layer_cost(
    parts: AttentionParts, rows: int, num_blocks: int, block_size: int, model: ModelSpec, implementation: str
) -> LayerCost:
    """The cost of attention in one layer, with the fused kernel of a card. See `LayerTensors.from_sizes`."""
    *tensors, out = LayerTensors.from_sizes(rows, num_blocks, block_size, model)
    ready, spec = prepare(parts, block_size, implementation=implementation), _spec(model)
    with fused_kernel():
        return LayerCost.from_stream(trace(unified_attention, *tensors, ready, spec, out))


def layer_nodes(
    parts: AttentionParts, rows: int, num_blocks: int, block_size: int, model: ModelSpec, *, fused: bool = False
) -> NodeCount:
    """Returns the nodes of a layer's attention in a graph for Gaudi, without those of `plan_nodes`. See
    `LayerTensors.from_sizes`.

    A selected part is the layer's own choice. fused: with the card's kernel if a step has only prompts.
    """
    spec = _spec(model)
    ready = prepare(parts, block_size, implementation="hpu")
    chosen = None if parts.selected is None else parts.selected.blocks.clone()

    def attend(tensors: LayerTensors, plan: Any, chosen: Tensor | None) -> Tensor:
        t, planned = tensors, replace(ready, plan=plan)
        return unified_attention(
            t.query, t.key, t.value, t.key_cache, t.value_cache, planned, spec, t.out, selected_blocks=chosen
        )

    with fused_kernel() if fused else nullcontext():
        return count_nodes(attend, LayerTensors.from_sizes(rows, num_blocks, block_size, model), ready.plan, chosen)


def plan_nodes(parts: AttentionParts, block_size: int) -> NodeCount:
    """Returns the nodes of the plan that a step's layers share, which is a graph of its own."""
    return count_nodes(lambda parts: prepare(parts, block_size, implementation="hpu").plan, parts)


Progress = Callable[[float], None]


@dataclass(frozen=True)
class OpCostRow:
    """form: `step` for the true shape, `bucket` for static ones, `unbounded` for a bucket without max prompt tiles.
    steps: number of steps that ran in it, None without traffic.

    least: the least work of the step; for a bucket with traffic, the mean of its steps; without, a step that fills it.
    """

    name: str
    text: str
    form: str
    shape: ForwardShape
    implementation: str
    cost: LayerCost
    least: Work
    steps: int | None = None

    @property
    def flops_ratio(self) -> float:
        return self.cost.flops / self.least.flops

    def bytes_ratio(self, device: str) -> float:
        return self.cost.bytes(device) / self.least.bytes

    def least_seconds(self, device: str) -> float:
        """Modelled."""
        return self.least.seconds(device_spec(device))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        devices = {}
        for device, stream in self.cost.by_device.items():
            devices[device] = {
                "bytes": stream.work.bytes,
                "bytes_ratio": round(self.bytes_ratio(device), 4),
                "modelled_seconds": self.cost.seconds(device),
                "least_modelled_seconds": self.least_seconds(device),
            }
        stream = next(iter(self.cost.by_device.values()))
        return {
            "name": self.name,
            "form": self.form,
            "shape": self.shape.to_list(),
            "steps": self.steps,
            "implementation": self.implementation,
            "least": asdict(self.least),
            "flops": self.cost.flops,
            "flops_ratio": round(self.flops_ratio, 4),
            "vector_elements": stream.work.vector,
            "touched_bytes": stream.touched,
            "operators": stream.operators,
            "devices": devices,
        }


def batch_rows(
    batches: Sequence[Batch], model: ModelSpec, block_size: int, max_model_len: int | None, progress: Progress
) -> list[OpCostRow]:
    """Returns a row for each batch at its true shape and in a bucket of exactly its sizes, by each implementation.

    max_model_len: tokens of a request, which bounds how far back rows look if the bucket does not; None: the batch's
        longest.
    """
    rows: list[OpCostRow] = []
    for done, batch in enumerate(batches):
        plan = batch.plan(block_size)
        longest = max(map(sum, batch.requests))
        limits = _limits(plan, block_size, max(longest, max_model_len or longest))
        unique = 0 if plan.unique is None else len(plan.unique.blocks)
        shape, least = true_shape(plan, unique).forward, least_work(plan, model)
        forms = [("step", shape, step_parts(plan)), ("bucket", shape, bucket_parts(shape, limits))]
        if shape.max_prompt_tiles != ALL_TILES:
            anything = shape.with_prompt_tiles(ALL_TILES)
            forms.append(("unbounded", anything, bucket_parts(anything, limits)))
        for place, ((form, sizes, parts), name) in enumerate(product(forms, IMPLEMENTATIONS)):
            cost = layer_cost(parts, plan.num_rows, limits.num_blocks, block_size, model, name)
            rows.append(OpCostRow(batch.name, batch.text, form, sizes, name, cost, least))
            progress((done + (place + 1) / (len(forms) * len(IMPLEMENTATIONS))) / len(batches))
    return rows


def bucket_rows(
    buckets: BucketSet, steps: Steps | None, model: ModelSpec, most: int, progress: Progress
) -> list[OpCostRow]:
    """Returns the buckets that cost the most: by traffic if there is any, otherwise the largest ones."""
    limits = buckets.limits
    chosen = _largest(buckets, model) if steps is None else _used(buckets, steps, model)
    rows: list[OpCostRow] = []
    for shape, count, least in chosen[:most]:
        for name in IMPLEMENTATIONS:
            parts = bucket_parts(shape.with_selected(0), limits)
            cost = layer_cost(parts, shape.query_len, limits.num_blocks, limits.block_size, model, name)
            rows.append(OpCostRow(_name(shape), "", "bucket", shape, name, cost, least, count))
            progress(len(rows) / (min(most, len(chosen)) * len(IMPLEMENTATIONS)))
    return rows


def _largest(buckets: BucketSet, model: ModelSpec) -> list[tuple[ForwardShape, int | None, Work]]:
    """Returns (bucket, None, the least work of a step that fills it), the most FLOPs first."""
    full = [(shape, None, _full(shape, buckets.limits, model)) for shape in buckets.forward]
    return sorted(full, key=lambda item: -item[2].flops)


def _used(buckets: BucketSet, steps: Steps, model: ModelSpec) -> list[tuple[ForwardShape, int | None, Work]]:
    """Returns (bucket, steps, the mean of their least work), the most modelled work first."""
    found, shapes = buckets.assign(steps.shapes), steps.forward
    used: list[tuple[ForwardShape, int | None, Work]] = []
    for index in np.unique(found):
        mine = found == index
        counts = steps.forward_counts[mine]
        works = [
            _full(ForwardShape.from_sizes(bool(c), q, s, u), buckets.limits, model)
            for c, q, s, u in shapes[mine].tolist()
        ]
        total = int(counts.sum())
        flops, moved = (
            float(np.dot(counts, [getattr(work, name) for work in works])) / total for name in ("flops", "bytes")
        )
        used.append((buckets.forward[index], total, Work(flops, moved)))
    return sorted(used, key=lambda item: -(item[1] or 0) * item[2].seconds(device_spec(next(iter(CHIPS)))))


def _full(shape: ForwardShape, limits: Limits, model: ModelSpec) -> Work:
    return full_work(shape.phase, shape.query_len, shape.shared_blocks, shape.unique_blocks, limits.block_size, model)


def _limits(plan: UnifiedPlan, block_size: int, max_model_len: int) -> Limits:
    blocks = 2 + int(plan.slots.max()) // block_size
    for part in (plan.shared, plan.unique):
        blocks = blocks if part is None else max(blocks, 2 + int(part.blocks.max()))
    return Limits(plan.num_rows, len(plan.requests), max_model_len, block_size, blocks, False)


def _name(shape: ForwardShape) -> str:
    return " ".join(map(str, shape.to_list()))
