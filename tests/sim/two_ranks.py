"""A program on two simulated cards, each driven by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim_path import SIM_PATH
from tests.warm_process import WarmProcess

SECONDS = 280


def on_two_ranks(program: str, folder: Path) -> None:
    """Runs it with the rank and a file for the group as arguments; both must end well."""
    env = {**os.environ, "PYTHONPATH": SIM_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PT_HPU_LAZY_MODE"] = "0"
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        WarmProcess(_run, (program, str(rank), str(folder / "store")), log=log, env=env, cwd=folder)
        for rank, log in enumerate(logs)
    ]
    try:
        ended = [rank.wait(SECONDS) for rank in ranks]
    except subprocess.TimeoutExpired:
        ended = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ended == [0, 0], "\n".join(log.read_text() for log in logs)


def _run(program: str, *arguments: str) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
