"""Runs a function of a test in a process of its own, on the simulated card: importing that changes torch for good."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import WARM, ProcessOnCard
from tests.import_heap import freeze_imports, leave_out_collections
from tests.sim_path import SIM_PATH
from tests.warm_process import WarmProcess

ROOT = Path(__file__).parents[2]
TIMEOUT = 280
FORK = "SIM_HPU_TORCH_FORK"
"""Of the simulator: the installed torch is to pass for the vendor's."""


@dataclass(frozen=True)
class Finished:
    """What the function returned, as JSON gives it back, and everything that the process has logged."""

    result: Any
    log: str


def run_on_card(
    scenario: Callable[..., Any],
    folder: Path,
    env: Mapping[str, str] | None = None,
    lazy: bool = False,
    **arguments: Any,
) -> Finished:
    """Calls a function of a module in a new process; arguments and result travel as JSON, in files of `folder`.

    lazy: in lazy mode, on what passes for the vendor's torch; else in the mode that a Gaudi has by default.
    Fails the test with the process's last lines where it raises.
    """
    mode = {"PT_HPU_LAZY_MODE": "1", FORK: "1"} if lazy else {}
    path = os.pathsep.join((SIM_PATH, os.environ["PYTHONPATH"]))
    hpu = {"PYTHONPATH": path, "VLLM_GAUDI_UCM_DEVICE": "hpu", **mode}
    # what else is in the environment is read while the card's software is imported
    kind = WARM.Process if lazy or env else ProcessOnCard
    return run_apart(scenario, folder, {**hpu, **(env or {})}, kind=kind, **arguments)


def run_apart(
    scenario: Callable[..., Any],
    folder: Path,
    env: Mapping[str, str],
    seconds: float = TIMEOUT,
    kind: type[ForkServerProcess] = WARM.Process,
    **arguments: Any,
) -> Finished:
    """The same in a process without the card. kind: see `WarmProcess`."""
    result = folder / f"{scenario.__name__}.json"
    asked = {
        "module": scenario.__module__,
        "name": scenario.__name__,
        "arguments": arguments,
        "result": str(result),
    }
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **env}
    # A file, not a pipe: a process that the engine leaves behind would keep a pipe open.
    log = folder / f"{scenario.__name__}.log"
    process = WarmProcess(_call, (json.dumps(asked),), log=log, env=env, cwd=ROOT, kind=kind)
    try:
        status = process.finish(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{scenario.__name__} runs {seconds} s later:\n{log.read_text()[-6000:]}")
    text = log.read_text()
    assert status == 0, text[-6000:]
    return Finished(json.loads(result.read_text()), text)


def _call(request: str) -> None:
    """In the new process."""
    asked = json.loads(request)
    if os.environ.get(FORK) == "1":
        import torch

        torch.__version__ = type(torch.__version__)(f"{torch.__version__.partition('+')[0]}a0+git0000000")
    gc.disable()
    scenario = getattr(importlib.import_module(asked["module"]), asked["name"])
    freeze_imports()
    leave_out_collections()
    if os.environ.get("VLLM_GAUDI_UCM_DEVICE") == "hpu":
        fork_workers()
    result = scenario(**asked["arguments"])
    with open(asked["result"], "w") as file:
        json.dump(result, file)


def fork_workers() -> None:
    """The plugin has vLLM spawn its processes; here they have nothing to import, and no card was started before."""
    for module in ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.utils"):
        vars(importlib.import_module(module))["get_mp_context"] = lambda: multiprocessing.get_context("fork")
