"""Loggers of the plugin: children of vLLM's own, so that its handlers and `VLLM_LOGGING_LEVEL` apply to them."""

import io
import logging
from collections.abc import Iterator

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
        for encoding in _encodings():
            message = printable(message, encoding)
        record.msg, record.args = message, ()
    return True


def _encodings() -> Iterator[str]:
    """Encodings of the streams that the log is written to; files of other handlers have their own."""
    handlers = logging.getLogger(PARENT).handlers
    streams = [handler.stream for handler in handlers if isinstance(handler, logging.StreamHandler)]
    # a StringIO has None
    yield from (stream.encoding for stream in streams if isinstance(stream, io.TextIOBase) and stream.encoding)
