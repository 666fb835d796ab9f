"""Helpers of `test_true_shape_tensors.py` that other tests use, too."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from tests.batch.batches import Step
from tests.batch.expand import owners
from tests.ops.batch import Batch
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.window import WHOLE, Window
from vllm_gaudi_ucm.execution.true_shape_tensors import ContiguousPa, TrueShapeTensors
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec, PerHead

CPU = torch.device("cpu")


HEADS, KV_HEADS, DIM = 4, 2, 8


WINDOWS = (
    st.none()
    | st.builds(Window, st.integers(1, 40), st.booleans(), st.just(False))
    | st.just(Window(WHOLE, by_distance=True))
)


def run_step(
    step: Step, contiguous_pa: ContiguousPa, causal_slice: int, seed: int = 0, window: Window | None = None
) -> Batch:
    """Stages a step over caches that hold NaN wherever no request has a token, block 0 included.

    Under a window also in all blocks that no row sees. With distances the layer has slopes.
    """
    plan = plan_batch(step.batch_input(), step.block_size, causal_slice, window=window)
    found = PlannedStep.of_tokens(plan, np.arange(plan.num_rows))
    staged = TrueShapeTensors(CPU, contiguous_pa).stage(found)[0]
    random = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    rows = owners(plan, step)
    query, key, value = (randn(len(rows), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = [torch.full((step.num_blocks, step.block_size, KV_HEADS, DIM), float("nan")) for _ in range(2)]
    for request, spec in enumerate(step.requests):
        for position in range(spec.computed):
            for cache in caches:
                cache[step.place(request, position)] = randn(KV_HEADS, DIM)
    expected = [cache.clone() for cache in caches]
    for row, owner in enumerate(rows):
        expected[0][step.place(*owner)], expected[1][step.place(*owner)] = key[row], value[row]
    key_cache, value_cache = caches
    write_kv(key, value, key_cache.flatten(0, 1), value_cache.flatten(0, 1), staged.slots)
    seen: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    used = set()
    for request, position in rows:
        first = 0 if window is None else int(window.first_seen(np.array([position]))[0])
        places = [step.place(request, p) for p in range(first, position + 1)]
        used |= set(places)
        block, offset = torch.tensor(places).T
        seen.append((expected[0][block, offset], expected[1][block, offset]))
    if window is not None:
        for block, offset in np.ndindex(step.num_blocks, step.block_size):
            if (block, offset) not in used:
                key_cache[block, offset] = value_cache[block, offset] = float("nan")
    slopes = window is not None and window.by_distance
    spec = AttentionSpec(DIM**-0.5, is_local=window is not None and not slopes, has_slopes=slopes)
    per_head = PerHead(slopes=torch.rand(HEADS, generator=random) if slopes else None)
    tensors = (query, key, value, key_cache, value_cache, staged.slots, staged.parts)
    return Batch(*tensors, spec, seen, per_head=per_head)
