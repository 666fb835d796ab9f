"""bfloat16 rows times a bfloat16 weight on the matrix unit, emulated, so that any machine can run it."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

from tests.ops.half_linear import check, problem
from tests.ops.native_variant import EMULATED_TILES
from vllm_gaudi_ucm.ops.cpu.native import build
from vllm_gaudi_ucm.ops.cpu.native.library import argument_types
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import pairs_of

NAME = "ucm_bf16_tile_linear"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here"),
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes._NamedFuncPointer:
    """The kernel over tiles in memory; what it does beyond the language ends the process."""
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    flags = ("-std=c++17", "-O2", "-march=native", "-fPIC", "-fopenmp", "-shared", "-Wno-psabi")
    checked = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    tiles = f'-DUCM_EMULATED_TILES="{EMULATED_TILES}"'
    sources = [str(build.SOURCE / name) for name in ("bf16_tiles.cpp", "matrix_tiles.cpp")]
    command = [build.find_compiler(), *flags, *checked, tiles, f"-I{build.SOURCE}", *sources, "-o", str(library)]
    build.run_compilers([command], library.parent)
    function = getattr(ctypes.CDLL(str(library)), NAME)
    function.restype, function.argtypes = None, argument_types(NAME)
    return function


def product(kernel: ctypes._NamedFuncPointer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    panels = pairs_of(weight)
    assert panels is not None
    found = torch.full((len(x), len(weight)), float("nan"), dtype=torch.bfloat16)
    offset = None if bias is None else bias.data_ptr()
    kernel(
        x.data_ptr(), x.stride(0), panels.address, offset, found.data_ptr(), *x.shape, len(weight), panels.width
    )  # fmt: skip
    return found


@pytest.mark.parametrize(("outputs", "inputs"), [(5 * 64, 96), (3 * 48, 32), (7 * 32, 64), (16, 160)])
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
def test_equals_float64(kernel: ctypes._NamedFuncPointer, rows: int, outputs: int, inputs: int) -> None:
    """Panels of every width, blocks of rows that are not full, rows that lie apart, a bias, and several threads."""
    x, weight, bias = problem(rows, outputs, inputs, torch.bfloat16)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            check(product(kernel, x, weight, bias), x, weight, bias)
            check(product(kernel, x, weight, None), x, weight, None)
        finally:
            torch.set_num_threads(before)


def test_a_row_has_the_same_bits_among_any_others(kernel: ctypes._NamedFuncPointer) -> None:
    x, weight, bias = problem(40, 192, 128, torch.bfloat16)
    whole = product(kernel, x, weight, bias)
    for rows in (1, 7, 16, 19, 33):
        assert torch.equal(product(kernel, x[:rows], weight, bias), whole[:rows])


def test_what_is_not_finite_stays_in_its_row(kernel: ctypes._NamedFuncPointer) -> None:
    """covers: D8."""
    x, weight, _ = problem(20, 128, 64, torch.bfloat16)
    x[18] = float("nan")
    found = product(kernel, x, weight, None)
    assert found[18].isnan().all()
    assert found[[*range(18), 19]].isfinite().all()
