"""Ten thousand random steps enter compiled regions with nothing that a warm bucket has not entered them with.

A Gaudi finds a graph by sizes, strides, storage offsets and dtypes of all tensors, and dynamo by every number, string
and None beside them. Both are compared here with what the bucket was warmed with, and no model runs:
`tests/engine/test_hpu_traffic.py` runs steps on the simulated card and counts what is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import torch

from tests.batch.traffic import Traffic
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.attention_group import step_metadata
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors, LogitsRows, cut_copies
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation

STEPS = 10_000
BLOCK_SIZE = 16
CPU = torch.device("cpu")
LIMITS = Limits(1024, 16, 1024, BLOCK_SIZE, 2048, contiguous=False)
COST = CostModel(device_spec("gaudi2"), LLAMA_8B, BLOCK_SIZE)


class Keys:
    """What steps enter regions with, by what their bucket was warmed with."""

    def __init__(self, buckets: BucketSet) -> None:
        self.buckets = buckets
        self.inputs = BucketTensors(LIMITS, 512, CPU, cut=cut_copies)
        self.logits_rows = LogitsRows(LIMITS.max_num_seqs, CPU)
        self.warm: dict[ForwardShape | int, Any] = {
            shape: self._of_forward(shape, self.inputs.fill_pads(shape)) for shape in buckets.forward
        }
        none = np.zeros(0, np.int64)
        self.warm.update((rows, describe(self.logits_rows.fill(rows, none))) for rows in buckets.logits)

    def of(self, plan: UnifiedPlan) -> dict[ForwardShape | int, Any]:
        """The same of a step, for its bucket's forward and logits."""
        step = true_shape(plan, 0 if plan.unique is None else len(plan.unique.blocks))
        bucket = self.buckets.lookup(step)
        found: dict[ForwardShape | int, Any] = {
            bucket.forward: self._of_forward(
                bucket.forward,
                self.inputs.fill(bucket.forward, PlannedStep.of_tokens(plan, np.zeros(plan.num_rows, np.int64))),
            )
        }
        if step.logits:
            rows = np.arange(step.logits)
            found[bucket.logits] = describe(self.logits_rows.fill(bucket.logits, rows))
        return found

    def _of_forward(self, shape: ForwardShape, flat: torch.Tensor) -> Any:
        inputs = self.inputs.split(flat, shape)
        metadata = step_metadata(inputs.slots, inputs.parts, BLOCK_SIZE, "hpu", None)
        return describe((flat, inputs.token_ids, inputs.positions, metadata))


def describe(value: Any) -> Any:
    """Everything by which a region tells two inputs apart."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(describe, value))
    if dataclasses.is_dataclass(value):
        # `checked` is what eager calls remember, and no region looks at it
        names = [field.name for field in dataclasses.fields(value) if field.name != "checked"]
        return type(value).__name__, tuple((name, describe(getattr(value, name))) for name in names)
    assert isinstance(value, AttentionImplementation), f"{type(value).__name__}: compare it, too"
    return value.name


def test_ten_thousand_random_steps_have_the_keys_of_warm_buckets() -> None:
    """covers: B1 B2"""
    shapes = itertools.product((False, True), (4, 16, 128), (0, 24), (0, 64, 256))
    forward = [ForwardShape.from_sizes(causal, *sizes) for causal, *sizes in shapes]
    keys = Keys(BucketSet(forward, [1, 4, 8], LIMITS, COST))
    rng, used, steps = random.Random(8), set(), 0
    while steps < STEPS:
        traffic = Traffic(rng, BLOCK_SIZE, rng.choice((0.05, 0.3, 0.8)))
        for _ in range(min(100, STEPS - steps)):
            batch = traffic.step()
            if not len(batch.num_scheduled) or batch.num_scheduled.sum() > LIMITS.max_num_batched_tokens:
                continue
            found = keys.of(plan_batch(batch, BLOCK_SIZE))
            for bucket, key in found.items():
                assert key == keys.warm[bucket], bucket
            used |= found.keys()
            steps += 1
    # steps that all had one bucket would prove little
    assert len(used) > 12


def test_a_number_or_an_offset_that_differs_is_seen() -> None:
    """What would compile: another stride, another place in a storage, another number beside the tensors."""
    whole = torch.zeros(4, 4)
    first = describe((whole[0], 1, None))
    assert describe((whole[0].clone(), 1, None)) == first
    for other in ((whole[1], 1, None), (whole[:, 0], 1, None), (whole[0], 2, None), (whole[0], 1, whole[0])):
        assert describe(other) != first
