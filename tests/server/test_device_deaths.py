"""`scripts/check_device_deaths.py` on the CPU: what serves is killed, and whoever waits for it gets an error soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts engines and a server

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_device_deaths.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["device", "engine", "server"])
def test_every_death_ends_the_caller(case: str, tmp_path: Path) -> None:
    """A device that fails behind a step of a rank that is not read; an engine, and a rank, that are killed."""
    command = [sys.executable, str(SCRIPT), "--cases", case, "--logs", str(tmp_path)]
    env = {**os.environ, "VLLM_GAUDI_UCM_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{case}: ok: ")
