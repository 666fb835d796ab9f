"""The folders of a device can be taken away: what is left passes its tests, and serves by what it has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.source_tree import PACKAGE, ROOMS, ROOT

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
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, target / PACKAGE, ignore=ignored)
    for room in ROOMS:
        shutil.copytree(ROOT / room, target / PACKAGE / room, ignore=ignored)
    # the tests' configuration imports the developer tools
    tools = "vllm_gaudi_ucm_tools"
    shutil.copytree(ROOT / "tools" / tools, target / tools, ignore=ignored)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / ".cache").symlink_to(ROOT / ".cache")
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


def run_tests(python: Path, copy: Path, *files: str, **variables: str) -> None:
    """Runs the quick tests of these files, which must pass, and not all be skipped."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    environment = {**os.environ, "PYTHONPATH": str(copy), **variables}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
