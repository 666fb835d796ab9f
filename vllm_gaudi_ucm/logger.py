"""Loggers of the plugin: children of vLLM's own, so that its handlers and `VLLM_LOGGING_LEVEL` apply to them."""

import logging


def plugin_logger(module: str) -> logging.Logger:
    """The logger of one of our modules, given its `__name__`. vLLM gives handlers to the logger `vllm` only."""
    return logging.getLogger("vllm.gaudi_ucm" + module.removeprefix("vllm_gaudi_ucm"))
