"""Dynamo's limit of compilations per function: beyond it a function runs eagerly without a word to the caller."""

import logging

from habana_frameworks.torch.simulator.duties import duties


class _Watch(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config"):
            duties.warn(
                25,
                "torch._dynamo",
                "a cache limit is exceeded: the function runs eagerly from now on",
                "raise torch._dynamo.config.recompile_limit before the first call",
            )


def watch_limits() -> None:
    """From now on what dynamo says of its limits is counted."""
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_Watch(logging.WARNING))
