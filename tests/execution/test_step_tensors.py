"""The table of step tensors: what is added to it arrives at true shape, and padded in a bucket."""

from __future__ import annotations

import numpy as np
import torch

from tests.batch.batches import Request, lay_out
from tests.execution.bucket_tensors import server_limits, step_shape
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import STEP_TENSORS, StepTensor
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors

CPU = torch.device("cpu")
ADAPTERS = np.array([5, 3, 4])
"""Of each request."""
ADAPTER_INDEX = StepTensor(
    "adapter_index",
    lambda step: ADAPTERS[step.plan.requests][step.plan.row_requests],
    lambda sizes: (sizes.shape.query_len,),
    pad=-1,
)
TABLE = (*STEP_TENSORS, ADAPTER_INDEX)


def test_an_entry_from_outside_arrives_at_true_shape_and_in_a_bucket() -> None:
    """One entry is all that an input of each row takes."""
    step = lay_out([Request(5, 1), Request(0, 3), Request(6, 1)], 4, 0)
    plan = plan_batch(step.batch_input(), 4)
    token_ids = np.arange(plan.num_rows)
    exact, _ = TrueShapeTensors(CPU, table=TABLE).stage(plan, token_ids)
    assert exact.others["adapter_index"].tolist() == [5, 4, 3, 3, 3]

    shape = step_shape(plan, contiguous=False)._replace(query_len=8).forward
    inputs = BucketTensors(server_limits(step, False, 3, 1, 1), 512, CPU, table=TABLE)
    padded = inputs.split(inputs.fill(shape, plan, token_ids), shape)
    assert padded.others["adapter_index"].tolist() == [5, 4, 3, 3, 3, -1, -1, -1]
    assert inputs.split(inputs.fill_pads(shape), shape).others["adapter_index"].tolist() == [-1] * 8


def test_every_entry_has_its_type_at_true_shape_and_int64_in_a_bucket() -> None:
    step = lay_out([Request(5, 1, prefix=1), Request(4, 3, prefix=1), Request(6, 1)], 4, 0)
    plan = plan_batch(step.batch_input(), 4)
    exact, _ = TrueShapeTensors(CPU, table=TABLE).stage(plan, np.arange(plan.num_rows))
    assert exact.parts.shared is not None
    assert exact.parts.shared.hi.dtype == torch.int32
    assert exact.others["adapter_index"].dtype == torch.int64
    limits = server_limits(step, False, 0, 0, 0)
    assert BucketTensors(limits, 512, CPU, table=TABLE).fill_pads(limits.maximum.forward).dtype == torch.int64
