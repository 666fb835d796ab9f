"""Ours in the CPU attention table: the step planned as the runner plans it, each implementation on the same parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_case import BLOCK_SIZE, SCALE, Case, CaseData
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec


def calls(case: Case, data: CaseData) -> dict[str, Callable[[], Tensor]]:
    """Returns calls by implementation. A call poisons its output first."""
    each = np.ones(case.requests, np.int32)
    tables = data.block_tables.numpy()
    plan = plan_batch(BatchInput(each * case.context, each * case.new, each * case.tokens, (tables,)), BLOCK_SIZE)
    staged = TrueShapeTensors(torch.device("cpu"), contiguous_pa=False).stage(
        PlannedStep.of_tokens(plan, np.zeros(plan.num_rows, np.int64))
    )[0]
    key, value = (cache.flatten(0, 1)[staged.slots] for cache in (data.keys, data.values))
    names = ["reference", "cpu"] + ["native"] * (native() is not None)

    def call(name: str) -> Callable[[], Tensor]:
        spec = AttentionSpec(SCALE)
        parts, out = prepare(staged.parts, BLOCK_SIZE, implementation=name), torch.empty_like(data.query)

        def run() -> Tensor:
            out.fill_(float("nan"))
            return unified_attention(data.query, key, value, data.keys, data.values, parts, spec, out)

        return run

    return {name: call(name) for name in names}
