"""Compiles the CUDA kernels for compute capability 9.0 where there is no GPU; prints each with its shared memory.

usage: python -m tests.ops.compile_for_hopper bfloat16|float32
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ops.batch import Batch, Request, Shape, build
from vllm_gaudi_ucm.ops.kv_cache.impl import cuda as kv_cache
from vllm_gaudi_ucm.ops.unified_attention.impl import cuda_parts, cuda_plan
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION


class Hopper:
    """A driver that says what it drives and can launch nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead_of_launching(found: dict[str, int]) -> None:
    """Every launch from here on compiles its kernel, and notes bytes of shared memory by name."""
    driver.set_active(Hopper())
    plain: Any = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kernel = plain(self, *arguments, grid=grid, warmup=True, **named)
        found[self.fn.__name__] = max(found.get(self.fn.__name__, 0), kernel.metadata.shared)

    JITFunction.run = run  # type: ignore[method-assign]


def attend(requests: list[Request], dtype: torch.dtype, block_size: int = 128) -> Batch:
    """Also what only a Hopper does: kernels that start before the one ahead of them has ended."""
    cuda_plan.multiprocessors = lambda device: 132
    cuda_plan.starts_early = cuda_parts.starts_early = lambda device: True  # type: ignore[assignment]
    shape = Shape(32, 8, 128, 128, block_size, dtype, poison=0.0, memory="pairs by token")
    batch = build(requests, shape)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    plan = ATTENTION.make("cuda").plan(batch.parts, shape.block_size)
    assert ATTENTION.make("cuda").attend(*tensors, plan, batch.spec, torch.empty_like(batch.query))
    return batch


def main(dtype: torch.dtype) -> None:
    chosen = frozenset({0, 1})
    found: dict[str, int] = {}
    compile_instead_of_launching(found)
    attend([Request(40, 1)], dtype, block_size=64)
    attend([Request(600, 1)], dtype)
    batch = attend([Request(600, 1, prefix=2), Request(700, 3, prefix=2), Request(400, 1, chosen=chosen)], dtype)
    rows = batch.key_cache.flatten(0, 1), batch.value_cache.flatten(0, 1)
    kv_cache.write(batch.key, batch.value, *rows, batch.slots)
    kv_cache.copy([batch.key_cache], [batch.value_cache], torch.zeros(1, 2, dtype=torch.int64))
    for name, shared in found.items():
        print(name, shared)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
