"""The native kernels as they are built for other CPUs, and the matrix unit's on this one: the same tests again."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.ops.native_variant import VARIANTS, why_not
from tests.warm_process import WarmProcess
from vllm_gaudi_ucm.ops.cpu.native import build

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "test_native_attention",
    "test_native_selected",
    "test_native_selection",
    "test_native_block_selection",
    "test_native_elementwise",
    "test_compact_weights",
    "test_packed_linear",
    "test_half_linear",
    "test_call_list",
    "test_kv_cache",
)
# What differs between the levels above AVX2: products of halves and of 8-bit codes, and attention to bfloat16.
LEVEL_FILES = (
    "test_native_attention",
    "test_native_elementwise",
    "test_compact_weights",
    "test_packed_linear",
    "test_half_linear",
)
# Tests of the matrix unit, which are skipped without one.
MATRIX_FILES = ("test_native_attention_matrix", "test_tile_linear", "test_matrix_unit")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here"),
]


def run_tests(arguments: list[str]) -> None:
    sys.exit(pytest.main(arguments))


@pytest.mark.parametrize(
    ("name", "files", "least", "left_out"),
    [
        ("x86-64-v2", FILES, 350, "cuda or pairs"),
        ("x86-64-v3", FILES, 350, "cuda or pairs"),
        ("x86-64-v4", LEVEL_FILES, 300, "cuda or pairs"),
        ("avx512-bf16", LEVEL_FILES, 300, "cuda"),
        ("amx", LEVEL_FILES + MATRIX_FILES, 400, "cuda or pairs"),
        ("emulated-tiles", FILES + MATRIX_FILES, 550, "cuda or pairs"),
    ],
)
def test_a_build_passes_the_tests_of_the_kernels(
    name: str, files: tuple[str, ...], least: int, left_out: str, tmp_path: Path
) -> None:
    """covers: A9, A13, A22, D8. Each is compiled here, once, and loaded by a process of its own; no test is skipped.

    They compare with the reference and with float64. The builds are those of a wheel, one for an older CPU, and
    `emulated-tiles`, in which a sanitizer ends the process where the language promises nothing.
    """
    if reason := why_not(VARIANTS[name]):
        pytest.skip(reason)
    plugins = ["-p", "tests.ops.native_variant", "--native-variant", name, "-p", "no:cacheprovider", "-p", "no:xdist"]
    # what ends the process is said on the real stderr
    options = ["-q", *plugins, "--timeout=250", "-k", f"not ({left_out})", "--capture=sys"]
    arguments = [*options, *(f"tests/ops/{file}.py" for file in files)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    log = tmp_path / "log.txt"
    status = WarmProcess(run_tests, (arguments,), log=log, env=environment, cwd=ROOT).finish(280)
    printed = log.read_text()
    assert status == 0, printed[-6000:]
    passed, skipped = (re.search(rf"(\d+) {word}", printed) for word in ("passed", "skipped"))
    assert passed is not None
    assert int(passed[1]) >= least, printed[-3000:]
    assert skipped is None, printed[-3000:]
    assert len(list((tmp_path / "vllm-gaudi-ucm" / "native").glob("*.so"))) == 1
