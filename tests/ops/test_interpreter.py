"""The CUDA kernels on a machine without a GPU: executed by Triton's interpreter, and compiled for a Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow  # starts processes

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper; CUDA documentation, compute capability 9.0


# of each file, how many tests are run at least
LEAST = {
    "ops.test_cuda_attention": 20,
    "ops.test_cuda_own_blocks": 10,
    "ops.test_cuda_latent": 6,
    "ops.test_cuda_block_selection": 20,
    "ops.test_cuda_kv_cache": 8,
    "ops.test_cuda_elementwise": 90,
    "ops.test_cuda_quantised": 25,
    "ops.test_moe": 8,
    "ops.test_moe_codes": 10,
    "ops.test_expert_choice": 18,
    "ops.test_cuda_narrow_caches": 20,
    "layers.test_cuda_layers": 7,
    "execution.test_bucket_tensors": 1,
    "sparse.selection.test_cuda_selection": 2,
}


def _run(arguments: list[str], **environment: str) -> str:
    """triton reads TRITON_INTERPRET when it is imported, so every run is a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_the_interpreter_runs_the_tests_of_the_cuda_kernels(tmp_path: Path) -> None:
    """covers: A9, A10, A11, A12, A13, A22. None of them is skipped there."""
    files = [f"tests/{name.replace('.', '/')}.py" for name in LEAST]
    plugins = ["-p", "tests.ops.quick_interpreter", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "-k", "cuda", *plugins, f"--junitxml={tmp_path / 'run.xml'}"]
    _run(["-m", "pytest", *files, *options], TRITON_INTERPRET="1")
    cases = list(ElementTree.parse(tmp_path / "run.xml").iter("testcase"))
    passed = Counter(case.attrib["classname"].removeprefix("tests.") for case in cases if not len(case))
    assert passed.total() == len(cases)
    assert {name: passed[name] >= least for name, least in LEAST.items()} == dict.fromkeys(LEAST, True)


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
        "divide_columns",
        "list_own",
        "place_own",
        "attend_own",
        "attend_causal",
        "merge_parts",
        "attend_latent_spans",
        "attend_latent_tiles",
        "attend_latent_causal",
        "summarise_blocks",
        "estimate_blocks",
        "estimate_boxes",
        "span_sums",
        "block_shares",
        "rank_candidates",
        "take_choices",
        "keep_or_replace_spans",
        "write_rows",
        "copy_pairs",
        "norm_rows",
        "rotate_heads",
        "gate_rows",
        "draw_rows",
        "find_candidates",
        "multiply_codes",
        "group_pairs",
        "multiply_gated",
        "multiply_shared",
        "multiply_gated_codes",
        "multiply_shared_codes",
        "sum_pairs",
        "add_parts",
        "choose",
        # of many rows, which are not compiled in float32
        *(["write_out"] if dtype == "bfloat16" else []),
    }
    assert max(found.values()) <= SHARED_MEMORY
