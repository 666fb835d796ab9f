"""Engines, their arguments and logs: `vllm.engine`, `vllm.v1.engine`, `vllm.logger`. For commands that start an engine.

Public: `EngineArgs`, `AsyncEngineArgs`, `AsyncLLM` and `LoggingConfig`.
Internal: `LLMEngine` and `Executor`, for an engine whose parts a command looks into; `EngineDeadError`;
`configure_logging`, for a command that sets the log level before it makes an engine; `FlexibleArgumentParser`, for one
that takes the flags of a server.
"""

from collections.abc import Sequence

from vllm.config import LoggingConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.logger import configure_logging
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor


def engine_args_of(flags: Sequence[str]) -> EngineArgs:
    """Returns the arguments of an engine that these flags of `vllm serve` mean, the model's name first.

    Reason: vLLM reads flags only to start a server, or in a program of its own.
    Remove when: vLLM has a call that makes engine arguments of a list of flags.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="gaudi-ucm warm ... MODEL", add_help=False))
    return EngineArgs.from_cli_args(parser.parse_args(["--model", *flags]))


__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineArgs",
    "EngineDeadError",
    "Executor",
    "LLMEngine",
    "LoggingConfig",
    "configure_logging",
    "engine_args_of",
]
