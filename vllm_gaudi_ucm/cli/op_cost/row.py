"""One line of `gaudi-ucm op-cost`: a layer's attention by one implementation, beside the least that the step needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.cli.op_cost.batches import Batch, full_work, least_work
from vllm_gaudi_ucm.cli.op_cost.layer import IMPLEMENTATIONS, LayerCost, bucket_parts, layer_cost, step_parts
from vllm_gaudi_ucm.execution.staging import true_shape
from vllm_gaudi_ucm.graphs.cost.device_figures import device_figures
from vllm_gaudi_ucm.graphs.cost.model_figures import ModelFigures
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.operator_cost.stream_cost import CHIPS, Work
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.causal_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Row:
    """form: `step` for its true shape, `bucket` for static ones, `any reach` for those of a bucket that does not bound
    how far rows look back on other new ones. steps: how many ran in it, None without traffic.

    least: what the step needs; of a bucket with traffic the mean of its steps, without it a step that fills it.
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
        return self.least.seconds(device_figures(device))

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
    batches: Sequence[Batch], model: ModelFigures, block_size: int, max_model_len: int | None, progress: Progress
) -> list[Row]:
    """Each batch at its true shape and in a bucket of exactly its sizes, by each implementation.

    max_model_len: tokens of a request, which is what bounds how far back rows look in a bucket that does not; None: the
        batch's longest.
    """
    rows: list[Row] = []
    for done, batch in enumerate(batches):
        plan = batch.plan(block_size)
        longest = max(map(sum, batch.requests))
        limits = _limits(plan, block_size, max(longest, max_model_len or longest))
        unique = 0 if plan.unique is None else len(plan.unique.blocks)
        shape, least = true_shape(plan, unique).forward, least_work(plan, model)
        forms = [("step", shape, step_parts(plan)), ("bucket", shape, bucket_parts(shape, limits))]
        if shape.causal_reach != ALL_TILES:
            anything = shape.with_reach(ALL_TILES)
            forms.append(("any reach", anything, bucket_parts(anything, limits)))
        for place, ((form, sizes, parts), name) in enumerate(product(forms, IMPLEMENTATIONS)):
            cost = layer_cost(parts, plan.num_rows, limits.num_blocks, block_size, model, name)
            rows.append(Row(batch.name, batch.text, form, sizes, name, cost, least))
            progress((done + (place + 1) / (len(forms) * len(IMPLEMENTATIONS))) / len(batches))
    return rows


def bucket_rows(
    buckets: BucketSet, steps: Steps | None, model: ModelFigures, most: int, progress: Progress
) -> list[Row]:
    """The buckets that cost the most: by traffic where there is any, else the largest ones."""
    limits = buckets.limits
    chosen = _largest(buckets, model) if steps is None else _used(buckets, steps, model)
    rows: list[Row] = []
    for shape, count, least in chosen[:most]:
        for name in IMPLEMENTATIONS:
            parts = bucket_parts(shape.with_selected(0), limits)
            cost = layer_cost(parts, shape.query_len, limits.num_blocks, limits.block_size, model, name)
            rows.append(Row(_name(shape), "", "bucket", shape, name, cost, least, count))
            progress(len(rows) / (min(most, len(chosen)) * len(IMPLEMENTATIONS)))
    return rows


def _largest(buckets: BucketSet, model: ModelFigures) -> list[tuple[ForwardShape, int | None, Work]]:
    """(bucket, None, what a step needs that fills it), the most FLOPs first."""
    full = [(shape, None, _full(shape, buckets.limits, model)) for shape in buckets.forward]
    return sorted(full, key=lambda item: -item[2].flops)


def _used(buckets: BucketSet, steps: Steps, model: ModelFigures) -> list[tuple[ForwardShape, int | None, Work]]:
    """(bucket, steps, mean of what they need), the most modelled work first."""
    found, shapes = buckets.assign(steps.shapes), steps.forward
    used: list[tuple[ForwardShape, int | None, Work]] = []
    for index in np.unique(found):
        mine = found == index
        counts = steps.forward_counts[mine]
        works = [
            _full(ForwardShape.of(bool(c), q, s, u), buckets.limits, model) for c, q, s, u in shapes[mine].tolist()
        ]
        total = int(counts.sum())
        flops, moved = (
            float(np.dot(counts, [getattr(work, name) for work in works])) / total for name in ("flops", "bytes")
        )
        used.append((buckets.forward[index], total, Work(flops, moved)))
    return sorted(used, key=lambda item: -(item[1] or 0) * item[2].seconds(device_figures(next(iter(CHIPS)))))


def _full(shape: ForwardShape, limits: Limits, model: ModelFigures) -> Work:
    return full_work(shape.phase, shape.query_len, shape.shared_blocks, shape.unique_blocks, limits.block_size, model)


def _limits(plan: UnifiedPlan, block_size: int, max_model_len: int) -> Limits:
    blocks = 2 + int(plan.slots.max()) // block_size
    for part in (plan.shared, plan.unique):
        blocks = blocks if part is None else max(blocks, 2 + int(part.blocks.max()))
    return Limits(plan.num_rows, len(plan.requests), max_model_len, block_size, blocks, False)


def _name(shape: ForwardShape) -> str:
    return " ".join(map(str, shape.to_list()))
