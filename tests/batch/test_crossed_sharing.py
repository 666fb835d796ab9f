"""Rows that share blocks crosswise: prefix caching may hand a request one block of each of two equal prefixes."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

BLOCK = 16


def test_a_row_shares_one_block_with_each_of_two_others() -> None:
    """Two requests computed the same prefix at the same time; a third found the first block of one of them in the
    cache and the second block of the other."""
    tables = np.array([[1, 2, 5], [1, 3, 6], [4, 2, 7]], np.int32)
    computed = np.full(3, 2 * BLOCK + 4, np.int32)
    plan = plan_batch(BatchInput(computed, np.ones(3, np.int32), computed + 1, (tables,)), BLOCK)
    staged = TrueShapeTensors(torch.device("cpu")).stage(PlannedStep.of_tokens(plan, np.zeros(3, np.int64)))[0]
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    key_cache, value_cache = torch.randn(8, BLOCK, 2, 16), torch.randn(8, BLOCK, 2, 16)
    found, expected = (
        unified_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            prepare(staged.parts, BLOCK, implementation=name),
            AttentionSpec(0.25),
        )
        for name in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)
