"""Kernels that are compiled before they are launched: found by a computation that launches none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gaudi_ucm.ops.registry import has_kernels

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# on a driver that can launch nothing
PROGRAM = """
import threading
from pathlib import Path
import torch
from triton import knobs
from triton.runtime import driver
from tests.ops.compile_for_hopper import Hopper
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import cuda_rms_norm
from vllm_gaudi_ucm.ops.cuda.side_by_side import compiled_side_by_side
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate
import vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm as norms, vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate as gates
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.triton.rows import norm_rows
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.triton.gates import gate_rows

launchers = []


class Launching(Hopper):
    def launcher_cls(self, src, metadata):
        launchers.append((src.fn.__name__, metadata.num_warps, threading.current_thread() is threading.main_thread()))


driver.set_active(Launching())
x = torch.ones(2, 256, dtype=torch.bfloat16)
compiled, told = [], []
knobs.runtime.jit_post_compile_hook = lambda **named: compiled.append(named["fn"].name)
before, listener = knobs.runtime.jit_cache_hook, knobs.compilation.listener
with compiled_side_by_side(lambda done, total: told.append((done, total))) as found:
    for _ in range(2):
        out, _ = cuda_rms_norm(x, None, 1e-5)
        gated = cuda_gate(x)
    assert not compiled and found.count == 2
    mark = found.mark()
assert not out.any() and not gated.any(), "nothing has been launched, and nothing is garbage"
assert knobs.runtime.jit_cache_hook is before and knobs.compilation.listener is listener
assert told == [(0, 2), (1, 2), (2, 2)] and found.compiled == 2, (told, found.compiled)
assert sorted(compiled) == ["gate_rows", "norm_rows"], compiled
assert sorted(name for name, _, _ in launchers) == ["gate_rows", "norm_rows"], launchers
assert not any(by_main for _, _, by_main in launchers), "they would be made in turn"
# another description is another kernel
cuda_device = driver.active.get_current_device()
print("kernels", len(norm_rows.device_caches[cuda_device][0]), len(gate_rows.device_caches[cuda_device][0]))
# another process finds them on disk
norm_rows.device_caches[cuda_device][0].clear()
with compiled_side_by_side() as again:
    cuda_rms_norm(x, None, 1e-5)
    alone = again.mark()
assert mark.parent == alone.parent == Path(knobs.cache.dir) and mark != alone and alone == again.mark()
assert (again.count, again.compiled) == (1, 0), again
assert len(norm_rows.device_caches[cuda_device][0]) == 1
"""


@pytest.mark.slow
def test_each_kernel_once_and_nothing_launched(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["kernels", "1", "1"]


def test_a_cpu_has_none() -> None:
    assert not has_kernels("cpu")
