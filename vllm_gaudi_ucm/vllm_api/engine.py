"""vLLM's engines and their arguments."""

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
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
]
