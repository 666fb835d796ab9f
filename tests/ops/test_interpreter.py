"""The CUDA kernels on a machine without a GPU: executed by Triton's interpreter. `test_hopper.py` compiles them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.ops.triton_process import run

pytestmark = pytest.mark.slow  # starts processes

pytest.importorskip("triton")

# of each file, how many tests are run at least
LEAST = {
    "ops.test_quick_interpreter": 1,
    "ops.test_cuda_attention": 20,
    "ops.test_cuda_own_blocks": 10,
    "ops.test_cuda_windows": 15,
    "ops.test_cuda_latent": 6,
    "ops.test_cuda_states": 18,
    "ops.test_cuda_slopes": 5,
    "ops.test_cuda_block_selection": 20,
    "ops.test_cuda_kv_cache": 8,
    "ops.test_cuda_elementwise": 90,
    "ops.test_rejection_sampling": 3,
    "ops.test_cuda_quantised": 25,
    "ops.test_cuda_int8": 25,
    "ops.test_lora": 13,
    "ops.test_chosen_tokens": 8,
    "ops.test_moe": 8,
    "ops.test_moe_codes": 10,
    "ops.test_expert_choice": 18,
    "ops.test_cuda_narrow_caches": 20,
    "layers.test_cuda_layers": 7,
    "execution.test_bucket_tensors": 1,
    "sparse.selection.test_cuda_selection": 2,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests itself")
@pytest.mark.timeout(600)
def test_the_interpreter_runs_the_tests_of_the_cuda_kernels(tmp_path: Path) -> None:
    """covers: A9, A10, A11, A12, A13, A22. None of them is skipped there."""
    files = [f"tests/{name.replace('.', '/')}.py" for name in LEAST]
    plugins = ["-p", "tests.ops.quick_interpreter", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "-k", "cuda", *plugins, f"--junitxml={tmp_path / 'run.xml'}"]
    run(["-m", "pytest", *files, *options], TRITON_INTERPRET="1")
    cases = list(ElementTree.parse(tmp_path / "run.xml").iter("testcase"))
    passed = Counter(case.attrib["classname"].removeprefix("tests.") for case in cases if not len(case))
    assert passed.total() == len(cases)
    assert {name: passed[name] >= least for name, least in LEAST.items()} == dict.fromkeys(LEAST, True)
