"""Freed memory stays in the process: seen in a process of its own, because the setting cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # large allocations in processes of their own

PROBE = """
import resource, torch
from vllm_gaudi_ucm.ops.cpu import host_memory as api

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros({numbers})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = all([getattr(api, name)() for name in {functions}])
faults()
print(int(kept), faults())
"""


@pytest.mark.parametrize(
    ("numbers", "functions"),
    [
        (5_000_000, ("keep_freed_memory",)),
        # 80 MB, more than glibc keeps at any threshold
        (20_000_000, ("keep_freed_memory", "keep_all_freed_memory")),
    ],
)
def test_pages_are_not_faulted_in_again(numbers: int, functions: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", PROBE.format(numbers=numbers, functions=functions)]
    kept, faults = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    # 20 x 20 MB are 97,656 pages of 4 KiB
    assert not kept or faults < 1000
