"""Helpers of `test_native_attention_pairs.py` that other tests use, too."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.batch import Batch, Shape

BRAIN = Shape(heads=6, kv_heads=2, dim=64, value_dim=64, dtype=torch.bfloat16)


def check(batch: Batch, out: Tensor) -> None:
    """Each weight is rounded to bfloat16 (u = eps / 2), their sum is that of the rounded ones: values are then off by u
    times their distance from the result. Scores are sums of exact products in fp32 (twice n + 1 roundings, as in
    test_half_linear.py), their errors factors of the weights. The result is rounded once."""
    brain, single = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
    assert out.isfinite().all()
    for row, seen in enumerate(batch.seen):
        if seen is None:
            assert not out[row].any()
            continue
        group = batch.query.shape[1] // batch.key.shape[1]
        keys, values = (tensor.double().repeat_interleave(group, 1).transpose(0, 1) for tensor in seen)
        query = batch.query[row].double()[:, None]
        scores = (query * keys).sum(-1) * batch.spec.scale
        terms = (query * keys).abs().sum(-1) * batch.spec.scale
        shares = torch.softmax(scores, -1)[..., None]
        exact = (shares * values).sum(1)
        distance = (shares * (values - exact[:, None]).abs()).sum(1)
        sizes = (shares * values.abs()).sum(1)
        of_scores = 2 * (query.shape[-1] + 1) * single * terms.max(-1, keepdim=True).values
        in_single = 2 * of_scores + 2 * (keys.shape[1] + 8) * single
        room = 1.02 * (brain / 2) * distance + in_single * sizes + 0.51 * brain * exact.abs()
        assert ((out[row].double() - exact).abs() <= room + torch.finfo(torch.bfloat16).smallest_normal).all(), row
