"""Helpers of `test_bucket_tensors.py` that other tests use, too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tests.batch.batches import Step
from tests.batch.token_steps import TokenStep
from tests.execution.true_shape_tensors import run_step
from tests.ops.batch import Batch
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import StepInputs, true_shape
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv

CPU = torch.device("cpu")


class Static(NamedTuple):
    """A step, its plan, and a bucket that dominates it within the limits of a server."""

    step: Step
    plan: UnifiedPlan
    bucket: Bucket
    limits: Limits
    causal_slice: int
    window: Window | None = None

    def inputs(self) -> BucketTensors:
        return BucketTensors(self.limits, self.causal_slice, CPU)

    def fill(self, inputs: BucketTensors) -> torch.Tensor:
        return inputs.fill(
            self.bucket.forward, PlannedStep.of_tokens(self.plan, np.arange(1000, 1000 + self.plan.num_rows))
        )


def server_limits(
    step: Step, contiguous: bool, rows: int, requests: int, blocks: int, window: Window | None = None
) -> Limits:
    """The tightest limits that allow the step, and so many more rows, requests and blocks."""
    longest = max((request.computed + request.new for request in step.requests), default=1)
    return Limits(
        max_num_batched_tokens=max(1, sum(request.new for request in step.requests)) + rows,
        max_num_seqs=max(1, len(step.requests)) + requests,
        max_model_len=longest + blocks * step.block_size,
        block_size=step.block_size,
        num_blocks=step.num_blocks + blocks,
        contiguous=contiguous,
        strip=1 if isinstance(step, TokenStep) else 0,
        window=0 if window is None else window.tokens,
    )


def step_shape(plan: UnifiedPlan, contiguous: bool) -> Bucket:
    blocks = [] if plan.unique is None else plan.unique.blocks.tolist()
    return true_shape(plan, max(blocks) + 1 if contiguous and blocks else len(blocks))


def in_bucket(static: Static, split: StepInputs) -> Batch:
    """The step over caches that hold NaN wherever no request has a token, its padded rows full of NaN, too."""
    plain = run_step(static.step, static.limits.contiguous, static.causal_slice, window=static.window)
    pads = static.bucket.query_len - static.plan.num_rows
    tensors = (plain.query, plain.key, plain.value)
    query, key, value = (torch.cat([tensor, tensor.new_full((pads, *tensor.shape[1:]), np.nan)]) for tensor in tensors)
    more = static.limits.num_blocks - static.step.num_blocks
    caches = (plain.key_cache, plain.value_cache)
    key_cache, value_cache = (torch.cat([cache, cache.new_full((more, *cache.shape[1:]), np.nan)]) for cache in caches)
    write_kv(key, value, key_cache.flatten(0, 1), value_cache.flatten(0, 1), split.slots)
    seen = plain.seen + [None] * pads
    tensors = (query, key, value, key_cache, value_cache, split.slots, split.parts)
    return Batch(*tensors, plain.spec, seen, per_head=plain.per_head)
