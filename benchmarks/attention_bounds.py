"""The physical limit of a batch on this CPU: bytes over bandwidth or FLOPs over peak, both measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.attention_case import DIM, HEADS, KV_HEADS, Case


class Machine(NamedTuple):
    """bytes_per_second: reading a gigabyte once. flops_per_second: a large fp32 matrix product."""

    bytes_per_second: float
    flops_per_second: float


def measure_machine() -> Machine:
    whole = torch.ones(2**28)
    size = 3072
    left, right = torch.randn(2, size, size)
    read = _best(whole.sum)
    product = _best(lambda: left @ right)
    return Machine(whole.nbytes / read, 2 * size**3 / product)


def limit_seconds(case: Case, machine: Machine) -> float:
    """The larger of reading every distinct cached token once, and multiplying every pair that is seen."""
    tokens = case.shared + case.requests * (case.tokens - case.shared)
    read = 4 * (2 * tokens * KV_HEADS * DIM + 2 * case.requests * case.new * HEADS * DIM)
    pairs = case.requests * (case.new * case.context + case.new * (case.new + 1) // 2)
    return max(read / machine.bytes_per_second, 4 * pairs * HEADS * DIM / machine.flops_per_second)


def _best(run: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
