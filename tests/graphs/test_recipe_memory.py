"""What recording costs in memory: nothing that grows, however long a region is and whatever it makes and drops."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from vllm_gaudi_ucm_tools.recipes.recorder import RecipeRecorder

ROUNDS, MIB = 60, 16

# as a server does on a CPU, for good: what is freed goes back to the heap, where it lies between what is not
PROBE = f"""
import resource, torch
from vllm_gaudi_ucm_tools.recipes.recorder import RecipeRecorder
from vllm_gaudi_ucm.ops.cpu.host_memory import keep_all_freed_memory

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

@torch.inference_mode()
def record(count):
    with RecipeRecorder("count", device_type="cpu").recording("region"):
        for _ in range(count):
            torch.ones({MIB} << 18).neg()

keep_all_freed_memory()
record(2)
before = peak()
record({ROUNDS})
print(peak() - before)
"""


def test_recording_takes_no_more_memory_than_the_region() -> None:
    """covers: F11"""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    # 120 tensors, two at a time; what the heap does not use again of them at once is a few
    assert int(done.stdout) < 20 * MIB


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_of_a_tensor_that_is_gone_is_kept(inference: bool) -> None:
    """Not its data nor the header of its storage: on the heap a few bytes keep the room before them from being used."""
    gone = []
    x, weights = torch.ones(4, 16), torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 4)
    with torch.inference_mode(inference), RecipeRecorder("count", device_type="cpu").recording("region"):
        for tensor in (torch.ones(8).neg(), torch.from_numpy(torch.ones(8).numpy()), weights):
            torch.ops.mkldnn._linear_pointwise(x, tensor, None, "none", [], "") if tensor is weights else tensor.sum()
            owner = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
            weakref.finalize(owner, gone.append, len(gone))
        headers = [torch.ones(8).neg().untyped_storage()._cdata for _ in range(200)]
        del tensor, owner, weights
        gc.collect()
        assert len(gone) == 3
    assert len(set(headers)) < 150, "the allocator gives a header's place to the next one"
