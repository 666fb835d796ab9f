"""A process for Triton, which reads TRITON_INTERPRET once, when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm_gaudi_ucm.envs import DEVICE

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], **environment: str) -> str:
    """Runs Python with these arguments and returns what it prints; it must end with status 0.

    The interpreter's process sees no GPU, and vLLM takes none for its platform, so that a kernel computes on the CPU on
    every machine.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if environment.get("TRITON_INTERPRET") == "1":
        environment |= {"CUDA_VISIBLE_DEVICES": "", DEVICE: "cpu"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
