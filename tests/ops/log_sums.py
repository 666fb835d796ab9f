"""Helpers of `test_log_sums.py` that other tests use, too."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tests.ops.batch import Request, Shape, build
from tests.ops.oracle import budget, on_gpu, oracle
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import NOTHING_SEEN, AttentionParts

# A row that sees nothing of either, rows that see one of them, and rows that see both.
REQUESTS = [Request(9, 1, prefix=2), Request(12, 1, prefix=3), Request(8, 7, prefix=2), Request(0, 11), Request(14, 4)]


def check_log_sums(implementation: str, dtype: torch.dtype) -> None:
    """New tokens and cached blocks apart, as latent attention computes them."""
    shape = Shape(heads=6, kv_heads=1, dim=40, value_dim=32, dtype=dtype, poison=math.nan, memory="in keys")
    batch = build(REQUESTS, shape)
    assert ATTENTION.make(implementation).gives_log_sums
    there = on_gpu(batch) if implementation == "cuda" and torch.cuda.is_available() else batch
    tensors = (there.query, there.key, there.value, there.key_cache, there.value_cache)
    outs, logs = [], torch.full((2, *there.query.shape[:2]), math.nan, device=there.query.device)
    new, cached = AttentionParts(there.parts.causal), there.parts._replace(causal=None)
    specs = replace(batch.spec, values_in_keys=False), batch.spec
    for log_sums, parts, spec in zip(logs, (new, cached), specs, strict=True):
        ready = prepare(parts, shape.block_size, implementation=implementation)
        outs.append(unified_attention(*tensors, ready, spec, log_sums=log_sums).cpu())
    logs = logs.cpu()
    real = len(batch.seen) - shape.pads
    assert (logs[:, real:] == NOTHING_SEEN).all()
    share = torch.softmax(logs, 0)[..., None]
    found = outs[0].double() * share[0] + outs[1].double() * share[1]
    expected = oracle(batch)
    assert found.isfinite().all()
    assert abs(found.numpy() - expected).max() <= 2 * budget(batch, expected)
