"""How many blocks a single row has at most, where the host knows it."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.graphs.shapes.limits import Limits

CPU, SIZE = torch.device("cpu"), 16
COMPUTED = np.array([100, 35, 7], np.int32)


def _staged(window: int) -> tuple[int | None, int | None]:
    """At the true shape, and in a bucket. window: 0 for none."""
    ones = np.ones(3, np.int32)
    tables = 1 + np.arange(3 * 8, dtype=np.int32).reshape(3, 8)
    batch = BatchInput(COMPUTED, ones, COMPUTED + 1, (tables,))
    plan = plan_batch(batch, SIZE, 512, window=Window(window) if window else None)
    tokens = np.zeros(3, np.int64)
    limits = Limits(
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_model_len=128,
        block_size=SIZE,
        num_blocks=32,
        contiguous=False,
        window=window,
    )
    tensors, shape = BucketTensors(limits, 512, CPU), true_shape(plan, len(plan.unique.blocks) if plan.unique else 0)
    exact, _ = TrueShapeTensors(CPU).stage(PlannedStep.of_tokens(plan, tokens))
    bucket = tensors.split(tensors.fill(shape.forward, PlannedStep.of_tokens(plan, tokens)), shape.forward).parts.unique
    assert exact.parts.unique is not None
    assert bucket is not None
    return exact.parts.unique.most_of_row, bucket.most_of_row


def test_a_step_knows_its_longest_row_and_a_bucket_its_window() -> None:
    assert _staged(0) == (7, None)
    assert _staged(20) == (2, 3)
