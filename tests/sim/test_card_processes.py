"""What the card does to a process that starts: its environment, and the kernels of its build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes
ON_HOST = True
SIM = Path(__file__).parents[1] / "sim_hpu"
CHILDREN = Path(__file__).parents[1] / "children"  # what every process of a test has

ENVIRONMENT = """
import os
os.environ["RUNTIME_SCALE_PATCHING"] = "1"
import habana_frameworks.torch
from habana_frameworks.torch.simulator.environment import environment
os.environ.setdefault("PT_HPU_WEIGHT_SHARING", "1")
os.environ["PT_HPU_LAZY_MODE"] = "0"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
assert environment.users == {"PT_HPU_WEIGHT_SHARING": "0", "PT_HPU_LAZY_MODE": "0"}, environment.users
assert environment.written == [
    ("RUNTIME_SCALE_PATCHING", "1"), ("PT_HPU_LAZY_MODE", "0"), ("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
], environment.written
try:
    os.environ["PT_HPU_LAZY_MODE"] = "1"
except RuntimeError as error:
    assert "PT_HPU_LAZY_MODE='1' over the user's '0'" in str(error), error
else:
    raise AssertionError("written over the user's value")
assert os.environ["PT_HPU_LAZY_MODE"] == "0"
"""


def child(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    watched = {"PT_HPU_WEIGHT_SHARING", "RUNTIME_SCALE_PATCHING", "VLLM_WORKER_MULTIPROC_METHOD"}
    inherited = {name: value for name, value in os.environ.items() if name not in watched}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": f"{SIM}:{CHILDREN}", **env},
        text=True,
        capture_output=True,
        timeout=600,
    )


def test_values_of_the_user_stay() -> None:
    """38"""
    done = child(ENVIRONMENT, PT_HPU_LAZY_MODE="0", PT_HPU_WEIGHT_SHARING="0")
    assert done.returncode == 0, done.stderr


def test_a_value_written_before_the_bridge_is_imported() -> None:
    """38"""
    program = "import os\nos.environ['PT_HPU_WEIGHT_SHARING'] = '1'\nimport habana_frameworks.torch"
    done = child(program, PT_HPU_WEIGHT_SHARING="0")
    assert "PT_HPU_WEIGHT_SHARING='1' over the user's '0'" in done.stderr, done.stderr


def test_what_a_build_lacks() -> None:
    """29: kernels of a younger build."""
    program = (
        "import habana_frameworks.torch, torch\n"
        "for name in ('softmax_fa2', 'block_softmax_adjustment', 'rms_norm'):\n"
        "    print(name, hasattr(torch.ops.hpu, name))"
    )
    done = child(program, SIM_HPU_BUILD="1.23.0.100")
    assert done.stdout.splitlines() == ["softmax_fa2 False", "block_softmax_adjustment True", "rms_norm True"]
