"""Probe 25: attention of the `hpu` implementation compared with the float64 oracle, in buckets."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm_tools.first_hour.bench import Bench
from vllm_gaudi_ucm_tools.first_hour.steps import (
    Heads,
    Step,
    bucket_inputs,
    bucket_region,
    bucket_tensors,
    make_step,
    new_tokens,
    oracle,
    padded,
)

IMPLEMENTATION = "hpu"


def beside_oracle(bench: Bench) -> None:
    """Probe 25."""
    heads = bench.pick(Heads(4, 2, 16, 16), Heads(8, 2, 128, 128))
    context = bench.pick(40, 1000)
    prefix = bench.pick(2, 4)
    start = prefix * heads.block_size
    cases = {
        "prompts": ([(0, context), (0, context // 2)], 0),
        "decodes": ([(context + 7 * i, 1) for i in range(4)], 0),
        "shared prefix": ([(start + 5 + 3 * i, 1) for i in range(4)], prefix),
        "chunk of a prompt": ([(2 * heads.block_size, context // 2)], 0),
        "everything": (
            [(start + 9, 1), (start + 20, 1), (start, context // 2)],
            prefix,
        ),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, (requests, shared) in cases.items():
            _compare(bench, f"{name}, {str(dtype).removeprefix('torch.')}", make_step(requests, shared, heads, dtype))


def _compare(bench: Bench, name: str, step: Step) -> None:
    shape, place = step.shape, bench.torch_device
    tensors = bucket_tensors(step.limits, bench)
    keys, values = new_tokens(step)
    rows = [padded(one, shape.query_len).to(place) for one in (step.query, keys, values)]
    caches = [cache.flatten(0, 1).to(place) for cache in (step.key_cache, step.value_cache)]
    flat = tensors.fill(shape, PlannedStep.of_tokens(step.plan, np.zeros(step.plan.num_rows, np.int64)))
    run = bench.region(bucket_region(step.heads, IMPLEMENTATION))
    found = run(*bucket_inputs(tensors, flat, shape), *rows, *caches).cpu().double()[: step.plan.num_rows]
    expected, budget = oracle(step)
    finite = bool(torch.isfinite(found).all())
    error = float((found - expected).abs().max()) if finite else float("inf")
    bench.claim(f"{name} ({shape.phase})", f"error {error:.1e}", f"at most {budget:.1e}", finite and error <= budget)
