"""Attention of one layer on CPU against torch SDPA with heads folded: ratios of interleaved medians, one table.

SDPA is given contiguous keys per request, which a paged cache never has: its time contains no gather.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice, UniquePart

SLICE = 512
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Model:
    """Head counts and head size; the default is SmolLM2-135M."""

    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    block_size: int = 128

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass(frozen=True)
class Workload:
    """Ours per implementation and the peer, on the same data."""

    ours: dict[str, Call]
    sdpa: Call


def decode(model: Model, requests: int, context: int) -> Workload:
    """One row per request over `context` cached tokens in scattered blocks."""
    per_request = context // model.block_size
    count = requests * per_request
    caches = torch.randn(2, count + 1, model.block_size, model.kv_heads, model.dim)
    blocks = 1 + torch.randperm(count)
    hi = torch.full((count,), model.block_size, dtype=torch.int32)
    rows = torch.arange(requests).repeat_interleave(per_request)
    parts = AttentionParts(unique=UniquePart(blocks, rows, torch.zeros_like(hi), hi, requests))
    query, new = torch.randn(requests, model.heads, model.dim), torch.randn(requests, model.kv_heads, model.dim)
    dense = (caches[:, blocks].view(2, requests, context, model.kv_heads, model.dim)).transpose(2, 3).contiguous()
    folded = query.view(requests, model.kv_heads, -1, model.dim)

    def peer() -> Tensor:
        return scaled_dot_product_attention(folded, dense[0], dense[1]).view_as(query)

    return Workload(_ours(model, query, new, new, caches, parts), peer)


def prefill(model: Model, prompts: int, length: int) -> Workload:
    """Fresh prompts of equal length, packed one after the other."""
    rows = prompts * length
    groups = torch.arange(prompts, dtype=torch.int32).repeat_interleave(length)
    slices = tuple(
        CausalSlice(lo, min(lo + SLICE, first + length), first, min(lo + SLICE, first + length))
        for first in range(0, rows, length)
        for lo in range(first, first + length, SLICE)
    )
    query = torch.randn(rows, model.heads, model.dim)
    key, value = torch.randn(2, rows, model.kv_heads, model.dim)
    caches = torch.zeros(2, 1, model.block_size, model.kv_heads, model.dim)
    groups_of_heads = model.heads // model.kv_heads
    q, k, v = (
        tensor.view(prompts, length, -1, model.dim).transpose(1, 2).contiguous() for tensor in (query, key, value)
    )
    k, v = (tensor.repeat_interleave(groups_of_heads, 1) for tensor in (k, v))

    def peer() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape_as(query)

    return Workload(_ours(model, query, key, value, caches, AttentionParts(CausalPart(groups, slices))), peer)


def _ours(
    model: Model, query: Tensor, key: Tensor, value: Tensor, caches: Tensor, parts: AttentionParts
) -> dict[str, Call]:
    def call(implementation: str) -> Call:
        ready = prepare(parts, model.block_size, implementation=implementation)
        out = torch.empty_like(query)

        def run() -> Tensor:
            out.fill_(float("nan"))
            return unified_attention(query, key, value, caches[0], caches[1], ready, model.scale, out)

        return run

    return {name: call(name) for name in _names()}


def _names() -> tuple[str, ...]:
    """The implementations that this machine has."""
    return ("reference", "cpu") if native() is None else ("reference", "cpu", "native")


def measure(workload: Workload, repeats: int) -> dict[str, float]:
    """Median milliseconds per contender, interleaved, and the largest difference from SDPA's result."""
    contenders = {**workload.ours, "sdpa": workload.sdpa}
    exact = workload.sdpa()
    figures = {f"{name}_error": float((run() - exact).abs().max()) for name, run in workload.ours.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return figures | {f"{name}_ms": statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per workload instead of a table")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    workloads: dict[str, Callable[[], Workload]] = {
        "decode B1 S512": lambda: decode(model, 1, 512),
        "decode B16 S512": lambda: decode(model, 16, 512),
        "decode B8 S4096": lambda: decode(model, 8, 4096),
        "prefill 1x2048": lambda: prefill(model, 1, 2048),
        "packed 8x256": lambda: prefill(model, 8, 256),
    }
    if not options.json:
        if native() is None:
            print(f"no native implementation: {why_not_native()}")
        print(f"{'workload':<18}" + "".join(f"{'sdpa/' + name:>16}" for name in _names()) + f"{'max error':>12}")
    for name, make in workloads.items():
        figures = measure(make(), options.repeats)
        error = max(figures[f"{ours}_error"] for ours in _names())
        if options.json:
            print(json.dumps({"workload": name, **figures}))
        else:
            ratios = (figures["sdpa_ms"] / figures[f"{ours}_ms"] for ours in _names())
            print(f"{name:<18}" + "".join(f"{ratio:>15.2f}x" for ratio in ratios) + f"{error:>12.1e}")


if __name__ == "__main__":
    main()
