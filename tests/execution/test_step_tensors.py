"""The table of step tensors: what is added to it arrives at true shape, and padded in a bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.batch.batches import Request, Step, lay_out
from tests.execution.bucket_tensors import server_limits, step_shape
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInput
from vllm_gaudi_ucm.execution.attention_group import ONE_GROUP
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.group_tensors import step_table
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors

CPU = torch.device("cpu")
ADAPTERS = np.array([5, 3, 4], np.int32)
"""Numbers of each row of the request table."""


class AdapterIndex(RowInput):
    """A number of each request."""

    name = "adapter_index"
    pad = -1


class Sections(RowInput):
    """Three numbers of each row."""

    name = "sections"
    columns = 3

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        return np.stack([plan.positions * factor for factor in (1, 2, 3)])


INPUTS = (*BUILT_IN_INPUTS, AdapterIndex, Sections)


def planned(step: Step) -> PlannedStep:
    """The step of a request table that has its requests in the rows 2, 0 and 1."""
    adapters, sections = AdapterIndex(3, 32), Sections(3, 32)
    adapters.kept[:] = ADAPTERS
    plan = plan_batch(step.batch_input()._replace(table_rows=np.array([2, 0, 1])), step.block_size)
    found = PlannedStep.of_tokens(plan, np.arange(plan.num_rows))
    inputs = {**found.inputs, "adapter_index": adapters.of(plan), "sections": sections.of(plan)}
    return found._replace(inputs=inputs)


def test_an_input_from_outside_arrives_at_true_shape_and_in_a_bucket() -> None:
    step = lay_out([Request(5, 1), Request(0, 3), Request(6, 1)], 4, 0)
    found = planned(step)
    exact, _ = TrueShapeTensors(CPU, inputs=INPUTS).stage(found)
    assert exact.rows["adapter_index"].tolist() == [4, 3, 5, 5, 5]
    assert exact.rows["sections"].tolist() == [[5, 6, 0, 1, 2], [10, 12, 0, 2, 4], [15, 18, 0, 3, 6]]

    shape = step_shape(found.plan, contiguous=False)._replace(query_len=8).forward
    inputs = BucketTensors(server_limits(step, False, 3, 1, 1), 512, CPU, inputs=INPUTS)
    padded = inputs.split(inputs.fill(shape, found), shape)
    assert padded.rows["adapter_index"].tolist() == [4, 3, 5, 5, 5, -1, -1, -1]
    assert padded.rows["sections"].tolist() == [[*row, 0, 0, 0] for row in exact.rows["sections"].tolist()]
    pads = inputs.split(inputs.fill_pads(shape), shape)
    assert pads.rows["adapter_index"].tolist() == [-1] * 8


def test_an_input_has_a_name_of_its_own() -> None:
    taken = type("Taken", (RowInput,), {"name": "slots"})
    with pytest.raises(ValueError, match=r"row input 'slots': found another tensor .* choose another name"):
        step_table(ONE_GROUP, (*BUILT_IN_INPUTS, taken))


def test_every_entry_has_its_type_at_true_shape_and_int64_in_a_bucket() -> None:
    step = lay_out([Request(5, 1, prefix=1), Request(4, 3, prefix=1), Request(6, 1)], 4, 0)
    exact, _ = TrueShapeTensors(CPU, inputs=INPUTS).stage(planned(step))
    assert exact.parts.shared is not None
    assert exact.parts.shared.hi.dtype == torch.int32
    assert exact.rows["adapter_index"].dtype == torch.int64
    limits = server_limits(step, False, 0, 0, 0)
    assert BucketTensors(limits, 512, CPU, inputs=INPUTS).fill_pads(limits.maximum.forward).dtype == torch.int64
