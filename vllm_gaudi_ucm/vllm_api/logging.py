"""vLLM's logging."""

from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging

__all__ = [
    "LoggingConfig",
    "configure_logging",
]
