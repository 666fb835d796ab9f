"""Freed memory stays in the process: seen in a process of its own, because the setting cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import ctypes, resource, torch
from vllm_gaudi_ucm.ops.host_memory.api import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(5_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()
print(int(kept), faults())
"""


def test_pages_are_not_faulted_in_again() -> None:
    command = [sys.executable, "-c", PROBE]
    kept, faults = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    # 20 x 20 MB are 97,656 pages of 4 KiB
    assert not kept or faults < 1000
