"""Attention by definition, in float64 numpy, and the error that an honest low-precision computation may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ops.batch import Batch
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention

# `cuda` on a GPU, or on a CPU under Triton's interpreter, which is slow and a process of its own (test_interpreter.py).
CUDA_RUNS = torch.cuda.is_available() or why_not_triton("cpu") is None
IMPLEMENTATIONS = ("reference", "cpu", "native", "hpu", *(("cuda",) if CUDA_RUNS else ()))


def examples(count: int) -> int:
    """How many examples a property test draws: a twentieth under Triton's interpreter."""
    return max(1, count // 20) if why_not_triton("cpu") is None else count


def oracle(batch: Batch) -> np.ndarray:
    """float64 [rows, heads, value_dim]: softmax over exactly what each row must see, zeros where that is nothing."""
    rows, heads, _ = batch.query.shape
    result = np.zeros((rows, heads, batch.value.shape[-1]))
    for row, seen in enumerate(batch.seen):
        if seen is None:
            continue
        keys, values = (tensor.double().numpy() for tensor in seen)
        query = batch.query[row].double().numpy()
        for head in range(heads):
            kv_head = head * keys.shape[1] // heads
            scores = keys[:, kv_head] @ query[head] * batch.spec.scale
            if (cap := batch.spec.logits_soft_cap) is not None:
                scores = cap * np.tanh(scores / cap)
            if batch.per_head.slopes is not None:
                scores = scores - float(batch.per_head.slopes[head]) * np.arange(len(scores))[::-1]
            weights, total = np.exp(scores - scores.max()), 0.0
            if batch.per_head.sinks is not None:
                total = np.exp(float(batch.per_head.sinks[head]) - scores.max())
            result[row, head] = weights @ values[:, kv_head] / (total + weights.sum())
    return result


def budget(batch: Batch, expected: np.ndarray) -> float:
    """2 x (error of a plain softmax in the batch's own dtype + an epsilon band)."""
    error, largest = 0.0, 1.0
    for row, seen in enumerate(batch.seen):
        if seen is None:
            continue
        groups = batch.query.shape[1] // batch.key.shape[1]
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in seen)
        scores = (batch.query[row][:, None] * keys.transpose(0, 1)).sum(-1) * batch.spec.scale
        if (cap := batch.spec.logits_soft_cap) is not None:
            scores = cap * torch.tanh(scores / cap)
        if batch.per_head.slopes is not None:
            away = torch.arange(scores.shape[-1] - 1, -1, -1)
            scores = (scores - batch.per_head.slopes[:, None] * away).to(scores.dtype)
        if batch.per_head.sinks is not None:
            scores = torch.cat((scores, batch.per_head.sinks[:, None].to(scores.dtype)), -1)
            values = torch.cat((values, torch.zeros_like(values[:1])))
        plain = (torch.softmax(scores, -1)[..., None] * values.transpose(0, 1)).sum(1)
        error = max(error, float(np.abs(plain.double().numpy() - expected[row]).max()))
        largest = max(largest, float(values.abs().max()))
    return 2 * (error + 4 * torch.finfo(batch.query.dtype).eps * largest)


def attend(
    batch: Batch, implementation: str, *, prepared: bool = False, selected_blocks: Tensor | None = None
) -> Tensor:
    """The operation under test, writing into a poisoned `out`."""
    if implementation == "cuda" and torch.cuda.is_available():
        batch = on_gpu(batch)
        selected_blocks = None if selected_blocks is None else selected_blocks.cuda()
    shape = (*batch.query.shape[:2], batch.value.shape[-1])
    out = torch.full(shape, float("nan"), dtype=batch.query.dtype, device=batch.query.device)
    parts = batch.parts
    ready = prepare(parts, batch.key_cache.shape[1], implementation=implementation) if prepared else parts
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    returned = unified_attention(
        *tensors,
        ready,
        batch.spec,
        out,
        implementation=implementation,
        selected_blocks=selected_blocks,
        per_head=batch.per_head,
    )
    assert returned is out
    return out.cpu()


def on_gpu(batch: Batch) -> Batch:
    """The batch with all tensors on the GPU, strides as they were."""
    names = ("query", "key", "value", "key_cache", "value_cache", "slots", "parts", "per_head")
    return replace(batch, **{name: _on_gpu(getattr(batch, name)) for name in names})


def _on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor) and 0 in value.stride():
        return value.to("cuda")  # one element stands for many: nothing can be copied into that
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda").copy_(value)
    if isinstance(value, tuple):
        items = [_on_gpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def assert_matches(batch: Batch, *implementations: str, prepared: bool = False) -> None:
    """Each of them, beside the same expectation: that takes longer than all of them."""
    expected = oracle(batch)
    allowed = budget(batch, expected)
    for name in implementations:
        out = attend(batch, name, prepared=prepared)
        assert torch.isfinite(out).all(), f"{name}: garbage reached a row"
        error = np.abs(out.double().numpy() - expected).max(initial=0.0)
        assert error <= allowed, name
        for row, seen in enumerate(batch.seen):
            if seen is None:
                assert not out[row].any(), f"{name}: row {row} sees nothing and must be zeros"
