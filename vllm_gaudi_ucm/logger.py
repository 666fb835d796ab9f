"""Loggers of the plugin: children of vLLM's own, so that its handlers and `VLLM_LOGGING_LEVEL` apply to them."""

import logging

from vllm_gaudi_ucm.printable import printable

PARENT = "vllm"


def plugin_logger(module: str) -> logging.Logger:
    """The logger of one of our modules, given its `__name__`. vLLM gives handlers to the logger `vllm` only."""
    logger = logging.getLogger(f"{PARENT}.gaudi_ucm" + module.removeprefix("vllm_gaudi_ucm"))
    logger.addFilter(_printable)
    return logger


def _printable(record: logging.LogRecord) -> bool:
    """Replaces characters that an output of the log lacks: logging would drop the line and print a traceback.

    A filter that changes its record, and lets all of them pass.
    """
    try:
        message = record.getMessage()
    except (TypeError, ValueError):
        return True  # logging reports a message that does not go with its arguments
    if not message.isascii():
        for handler in logging.getLogger(PARENT).handlers:
            # a handler without a stream writes elsewhere than to the terminal, and chooses its own encoding
            encoding = getattr(getattr(handler, "stream", None), "encoding", None)
            if encoding:
                message = printable(message, encoding)
        record.msg, record.args = message, ()
    return True
