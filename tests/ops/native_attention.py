"""Helpers of `test_native_attention.py` that other tests use, too."""

from __future__ import annotations

import math

import torch

from tests.ops.batch import Batch, Request
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(5, 3, family=1, prefix=1),
    Request(0, 90),
    Request(14, 70),
]


def attend_natively(batch: Batch) -> tuple[bool, torch.Tensor]:
    plan = ATTENTION.make("native").plan(batch.parts, batch.key_cache.shape[1])
    out = torch.full((*batch.query.shape[:2], batch.value.shape[-1]), math.nan, dtype=batch.query.dtype)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    return ATTENTION.make("native").attend(*tensors, plan, batch.spec, out), out
