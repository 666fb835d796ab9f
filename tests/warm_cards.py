"""What engines on the simulated card import, vLLM included: loaded once, then they fork from it.

The bridge is not among it: a process that has imported that must not be forked. `warm_imports` is for any device.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

importlib.import_module("tests.warm_imports")
gc.disable()
os.environ["VLLM_GAUDI_UCM_DEVICE"] = "hpu"
# as in a process that has it on PYTHONPATH
sys.path.insert(0, str(Path(__file__).parent / "sim_hpu"))
for name in (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.multiproc_executor",
    "vllm_gaudi_ucm.platform.worker",
    "vllm_gaudi_ucm.runner.model_runner",
    "tests.engine.serving",
):
    importlib.import_module(name)
gc.freeze()
gc.enable()
