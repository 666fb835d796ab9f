"""Runs of `gaudi-ucm first-hour` in a process of its own, on the CPU or on the simulated card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sim_path import SIM_PATH

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
ON_CARD = {"VLLM_GAUDI_UCM_DEVICE": "hpu", "PYTHONPATH": f"{SIM_PATH}:{ROOT / 'tests/children'}"}
ON_CPU = {"VLLM_GAUDI_UCM_DEVICE": "cpu"}


@dataclass(frozen=True)
class Run:
    """An ended run."""

    status: int
    report: dict[str, Any]
    output: Path
    errors: str

    def verdicts(self) -> dict[str, str]:
        """By number, mode and case, as in `11 eager gather -1`."""
        return {self.name(one): one["verdict"] for one in self.report["results"]}

    @staticmethod
    def name(result: Mapping[str, Any]) -> str:
        return " ".join(filter(None, (str(result["number"]), result["mode"], result["case"])))

    def result(self, name: str) -> dict[str, Any]:
        (found,) = [one for one in self.report["results"] if self.name(one) == name]
        return dict(found)


def first_hour(folder: Path, env: Mapping[str, str], *arguments: str) -> Run:
    """Small sizes; the report is the JSON of stdout."""
    output = folder / "report"
    command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "first-hour", "--sizes", "small", "--json"]
    done = subprocess.run(
        [*command, "--output", str(output), *arguments],
        env={**os.environ, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout, done.stderr[-4000:]
    return Run(done.returncode, json.loads(done.stdout), output, done.stderr)
