"""Memory for the KV cache on a CPU, which the workers of a server share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.device import Memory
from vllm_gaudi_ucm.device.cpu import CpuDevice
from vllm_gaudi_ucm.kv_cache.allocation import CPU_DEFAULT, GIB, kv_cache_budget


class Host(CpuDevice):
    def __init__(self, free: int) -> None:
        self.free = free

    def memory(self) -> Memory:
        return Memory(self.free, 64 * GIB)


def budget(free: int, workers: int, explicit: int | None = None) -> int:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=explicit))
    return kv_cache_budget(Host(free), config, lambda: pytest.fail("a CPU is not measured"), workers)


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_workers_share_the_default(workers: int) -> None:
    assert budget(32 * GIB, workers) == CPU_DEFAULT // workers
    assert budget(GIB, workers) == GIB // 2 // workers


def test_what_the_user_says_is_for_each_worker() -> None:
    assert budget(32 * GIB, 2, explicit=3 * GIB) == 3 * GIB
