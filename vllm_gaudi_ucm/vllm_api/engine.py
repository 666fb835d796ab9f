"""Engines, their arguments and logs: `vllm.engine`, `vllm.v1.engine`, `vllm.logger`. For commands that start an engine.

Public: `EngineArgs`, `AsyncEngineArgs`, `AsyncLLM` and `LoggingConfig`.
Internal: `LLMEngine` and `Executor`, for an engine whose parts a command looks into; `EngineDeadError`;
`configure_logging`, for a command that sets the log level before it makes an engine.
"""

from vllm.config import LoggingConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.logger import configure_logging
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineArgs",
    "EngineDeadError",
    "Executor",
    "LLMEngine",
    "LoggingConfig",
    "configure_logging",
]
