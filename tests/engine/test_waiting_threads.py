"""Idle threads of an engine's process give up their cores soon, because OpenMP was told so before it was loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.serving import TINY_OPTIONS
from vllm_gaudi_ucm.device.host_limits import find_cores
from vllm_gaudi_ucm.envs import SPINS_OF_A_CORE

# a start itself: nothing of it may be imported before
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
OPTIONS = {**TINY_OPTIONS, "worker_extension_cls": "tests.engine.environment_worker.EnvironmentWorker"}
# on few cores it does not depend on what others compute
PROGRAM = """
import json, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    print("seen", json.dumps(llm.collective_rpc("get_waiting")))
"""
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPINS_OF_A_CORE * min(2, find_cores().usable))}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_an_engine_starts_with_it(
    user: dict[str, str], expected: dict[str, str], tiny_llama: Path, tmp_path: Path
) -> None:
    """covers: F9. The user's own choice stays, and the log says which one it is."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    base = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment = {**base, **user, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_GAUDI_UCM_DEVICE": "cpu"}
    options = json.dumps({**OPTIONS, "model": str(tiny_llama)})
    done = subprocess.run(
        [sys.executable, str(program), options],
        env={**environment, "PYTHONPATH": os.pathsep.join((str(ROOT), base.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    seen = [line for line in done.stdout.splitlines() if line.startswith("seen")]
    assert seen, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(seen[0].removeprefix("seen")) == [expected]
    ((name, value),) = expected.items()
    assert f"idle ones wait by {name}={value}." in done.stdout + done.stderr
