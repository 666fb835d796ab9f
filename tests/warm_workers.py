"""What servers and workers on the CPU import, vLLM included: loaded once, then they fork from it.

`warm_imports` is for processes of any device; here the platform's plugins are asked, and answer for the CPU.
"""

from __future__ import annotations

from tests.warm_imports import import_vllm

import_vllm(
    "cpu",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.online.base",
)
