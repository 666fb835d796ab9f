"""Each KV-cache group attends by its own blocks, at true shapes and in a bucket, and reads none before its window."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.batches import POISON_BLOCK, Step, steps
from vllm_gaudi_ucm.batch.batch_plan import GroupPlan
from vllm_gaudi_ucm.batch.group_planner import make_planner
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.execution.attention_group import AttentionGroup
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.api import unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

CPU = torch.device("cpu")
MOST_BLOCKS = 600


def limits_of(step: Step) -> Limits:
    """With room for a few rows and requests more."""
    rows = sum(request.new for request in step.requests)
    longest = max(request.num_tokens for request in step.requests)
    return Limits(rows + 3, len(step.requests) + 1, longest, step.block_size, MOST_BLOCKS, contiguous=False)


def attention(
    slots: torch.Tensor, parts: AttentionParts, plan: GroupPlan, block_size: int, local: bool
) -> torch.Tensor:
    """[real rows, heads, dim]. Blocks that the plan does not use hold NaN, and so do new tokens of padded rows."""
    rows, real = len(slots), len(plan.slots)
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, real, 2, 4, generator=random)
    pad = query.new_full((rows - real, 2, 4), float("nan"))
    query, key, value = (torch.cat([tensor, pad]) for tensor in (query, key, value))
    caches = torch.randn(2, MOST_BLOCKS, block_size, 2, 4, generator=random)
    used = {int(slot) // block_size for slot in plan.slots}
    for part in (plan.shared, plan.unique):
        used |= set() if part is None else set(part.blocks.tolist())
    unused = [block for block in range(MOST_BLOCKS) if block not in used]
    caches[:, unused] = float("nan")
    key_cache, value_cache = caches
    write_kv(key, value, key_cache.flatten(0, 1), value_cache.flatten(0, 1), slots)
    spec = AttentionSpec(0.5, is_local=local)
    found = unified_attention(query, key, value, key_cache, value_cache, parts, spec, implementation="reference")
    return found[:real]


@given(
    steps(block_sizes=(2, 4), max_requests=6).filter(lambda step: bool(step.requests)), st.integers(1, 20), st.data()
)
def test_groups_in_a_bucket_attend_as_at_true_shapes(step: Step, tokens: int, data: st.DataObject) -> None:
    size = step.block_size
    groups = (KvGroup(0, size), KvGroup(1, size, Window(tokens)), KvGroup(2, size))
    first = step.batch_input()
    moved = np.where(first.block_tables == POISON_BLOCK, POISON_BLOCK, MOST_BLOCKS - 1 - first.block_tables)
    batch = first._replace(tables=(first.block_tables, moved.astype(np.int32), first.block_tables))
    plan = make_planner(groups, 5).plan(batch)
    kinds, token_ids = [AttentionGroup(group) for group in groups], np.arange(plan.num_rows)
    exact, _ = TrueShapeTensors(CPU, False, None, kinds).stage(PlannedStep.of_tokens(plan, token_ids))

    limits = limits_of(step)
    true = true_shape(plan, 0 if plan.unique is None else len(plan.unique.blocks))
    needed, most = LayerGroups(tuple(kinds)).held(true, plan), limits.maximum
    shape = data.draw(st.sampled_from([needed, most])).forward
    inputs = BucketTensors(limits, 5, CPU, groups=kinds)
    padded = inputs.split(inputs.fill(shape, PlannedStep.of_tokens(plan, token_ids)), shape)

    assert len(exact.groups) == len(padded.groups) == 3
    for group, own, one, other in zip(groups[1:], plan.groups[1:], exact.groups[1:], padded.groups[1:], strict=True):
        local = group.window is not None
        expected = attention(one.slots, one.parts, own, size, local)
        found = attention(other.slots, other.parts, own, size, local)
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
