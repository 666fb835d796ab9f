"""Runs a function of a test in a process of its own, on the simulated card: importing that changes torch for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 280
PROGRAM = """
import importlib, json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
asked = json.loads(sys.argv[1])
scenario = getattr(importlib.import_module(asked["module"]), asked["name"])
result = scenario(**asked["arguments"])
with open(asked["result"], "w") as file:
    json.dump(result, file)
"""


@dataclass(frozen=True)
class Finished:
    """What the function returned, as JSON gives it back, and everything that the process has logged."""

    result: Any
    log: str


def run_on_card(
    scenario: Callable[..., Any], folder: Path, env: Mapping[str, str] | None = None, **arguments: Any
) -> Finished:
    """Calls a function of a module in a new process; arguments and result travel as JSON, in files of `folder`.

    Fails the test with the process's last lines where it raises.
    """
    result = folder / f"{scenario.__name__}.json"
    asked = {
        "module": scenario.__module__,
        "name": scenario.__name__,
        "arguments": arguments,
        "result": str(result),
    }
    hpu = {"PYTHONPATH": str(ROOT / "tests/sim_hpu"), "VLLM_GAUDI_UCM_DEVICE": "hpu", "PT_HPU_LAZY_MODE": "1"}
    # Files, not pipes: a process that the engine leaves behind would keep a pipe open.
    log = folder / f"{scenario.__name__}.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(asked)],
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **hpu, **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-6000:]
    return Finished(json.loads(result.read_text()), text)
