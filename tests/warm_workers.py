"""What servers and workers on the CPU import, vLLM included: loaded once, then they fork from it.

`warm_imports` is for processes of any device; here the platform's plugins are asked, and answer for the CPU.
"""

from __future__ import annotations

import gc
import importlib
import os

importlib.import_module("tests.warm_imports")
gc.disable()
os.environ["VLLM_GAUDI_UCM_DEVICE"] = "cpu"
for name in (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.executor.multiproc_executor",
    "vllm_gaudi_ucm.platform.worker",
    "vllm_gaudi_ucm.runner.model_runner",
):
    importlib.import_module(name)
gc.freeze()
gc.enable()
