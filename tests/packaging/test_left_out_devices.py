"""The folders of a device can be taken away: what is left passes its tests, and serves by what it has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.packaging.left_out import copy_installed, run_tests
from tests.packaging.source_tree import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVICES = ("cpu", "cuda", "hpu")
# Engines that serve requests, and an operation that has no folder of a CPU.
COMMON = (
    "tests/engine/test_phases.py",
    "tests/engine/test_dense_after_sparse.py",
    "tests/ops/test_row_noise.py",
)
OF_DEVICE = {
    "cpu": ("tests/layers/test_cpu_layers.py", "tests/ops/test_native_block_selection.py"),
    "cuda": ("tests/layers/test_cuda_layers.py", "tests/ops/test_expert_choice.py"),
    "hpu": ("tests/layers/test_gaudi_layers.py", "tests/ops/test_gaudi_operators.py"),
}


def copy_without(devices: tuple[str, ...], target: Path) -> Path:
    """The package in its installed shape and its tests, without the folders named after these devices."""
    copy_installed(target)
    left_out = [path for device in devices for path in (target / PACKAGE).rglob(device) if path.is_dir()]
    assert left_out
    for path in left_out:
        if path.relative_to(target / PACKAGE).parts[0] != "vllm_api":
            shutil.rmtree(path)
    return target


@pytest.mark.parametrize("left_out", [*((device,) for device in DEVICES), DEVICES], ids="-".join)
def test_the_others_work_without_a_devices_folders(
    left_out: tuple[str, ...], plain_python: Path, tmp_path: Path
) -> None:
    copy, others = copy_without(left_out, tmp_path / "copy"), set(DEVICES) - set(left_out)
    run_tests(plain_python, copy, *COMMON, *(file for device in others - {"cuda"} for file in OF_DEVICE[device]))
    if others == {"cuda", "hpu"}:
        # without a GPU its kernels are interpreted, which takes long: once is enough
        run_tests(plain_python, copy, *OF_DEVICE["cuda"], TRITON_INTERPRET="1")
