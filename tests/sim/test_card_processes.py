"""What the card does to a process that starts: its environment, and the kernels of its build."""

from __future__ import annotations

import os

import pytest

from tests.sim.forks import Program, in_forks

pytestmark = pytest.mark.slow  # starts processes
ON_HOST = True

# The bridge reads what a process was started with, which no test can change in one that runs.
USERS = {"PT_HPU_LAZY_MODE": "0", "PT_HPU_WEIGHT_SHARING": "0"}
PROGRAMS = {
    "values of the user": """
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
""",
    "written before": """
import os
os.environ['PT_HPU_WEIGHT_SHARING'] = '1'
import habana_frameworks.torch
""",
    "another build": """
import os
os.environ["SIM_HPU_BUILD"] = "1.23.0.100"
import habana_frameworks.torch, torch
for name in ('softmax_fa2', 'block_softmax_adjustment', 'rms_norm'):
    print(name, hasattr(torch.ops.hpu, name))
""",
}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """Lines of each program."""
    watched = {"RUNTIME_SCALE_PATCHING", "VLLM_WORKER_MULTIPROC_METHOD"}
    inherited = {name: value for name, value in os.environ.items() if name not in watched}
    return in_forks({name: Program(program, {}) for name, program in PROGRAMS.items()}, {**inherited, **USERS})


def test_values_of_the_user_stay(printed: dict[str, list[str]]) -> None:
    """38"""
    assert printed["values of the user"] == ["done"]


def test_a_value_written_before_the_bridge_is_imported(printed: dict[str, list[str]]) -> None:
    """38"""
    (error,) = printed["written before"]
    assert "PT_HPU_WEIGHT_SHARING='1' over the user's '0'" in error


def test_what_a_build_lacks(printed: dict[str, list[str]]) -> None:
    """29: kernels of a younger build."""
    kernels = ["softmax_fa2 False", "block_softmax_adjustment True", "rms_norm True"]
    assert printed["another build"] == [*kernels, "done"]
