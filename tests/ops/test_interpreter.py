"""The CUDA kernels on a machine without a GPU: executed by Triton's interpreter, and compiled for a Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper; CUDA documentation, compute capability 9.0


def _run(arguments: list[str], **environment: str) -> str:
    """triton reads TRITON_INTERPRET when it is imported, so every run is a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("ops/test_cuda_attention.py", 20),
        ("ops/test_cuda_block_selection.py", 20),
        ("ops/test_cuda_kv_cache.py", 8),
        ("execution/test_bucket_tensors.py", 1),
    ],
)
def test_the_interpreter_runs_the_tests_of_the_cuda_kernels(file: str, least: int) -> None:
    """covers: A9, A10, A11, A12, A13, A22. None of them is skipped there."""
    options = ["-q", "-k", "cuda", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=250"]
    report = _run(["-m", "pytest", f"tests/{file}", *options], TRITON_INTERPRET="1")
    passed, skipped = (re.search(rf"(\d+) {word}", report) for word in ("passed", "skipped"))
    assert passed is not None
    assert int(passed[1]) >= least
    assert skipped is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_compile_for_a_hopper(dtype: str) -> None:
    """Every kernel of a step with all parts, heads of 128: no GPU is needed to see that it compiles and fits."""
    lines = _run(["-m", "tests.ops.compile_for_hopper", dtype], TRITON_INTERPRET="0").splitlines()
    found = {name: int(shared) for name, shared in (line.split() for line in lines)}
    assert set(found) == {
        "list_columns",
        "find_bounds",
        "repair_causal",
        "attend_rows",
        "attend_spans",
        "attend_shared",
        "attend_causal",
        "merge_parts",
        "write_rows",
        "copy_pairs",
    }
    assert max(found.values()) <= SHARED_MEMORY
