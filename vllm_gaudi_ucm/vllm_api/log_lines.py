"""Lines of vLLM's log that are untrue here, and one that it lacks."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.child_watch import outputs_ended_as_asked

logger = plugin_logger(__name__)


class _Line(NamedTuple):
    """A line of vLLM, by its logger and first words. untrue: called for each such line."""

    logger: str
    begins: str
    untrue: Callable[[], bool]


def _always() -> bool:
    return True


_LINES = (
    # it is the plugin's setting, not a user's, and logged as such
    _Line("vllm.config.vllm", "Inductor compilation was disabled by user settings", _always),
    # neither of vLLM's model runners is used
    _Line("vllm.config.vllm", "Model Runner V2 requires Triton", _always),
    # with a traceback, one time in two, when a server is stopped
    _Line("vllm.v1.engine.async_llm", "AsyncLLM output_handler failed", outputs_ended_as_asked),
)


class _Untrue(logging.Filter):
    """Drops the lines of `_LINES` that one logger writes."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return not any(line.logger == record.name and text.startswith(line.begins) and line.untrue() for line in _LINES)


_UNTRUE = _Untrue()


def leave_out_untrue_lines() -> None:
    """Leaves out warnings about settings that no user made, and the traceback of an engine that was asked to end.

    Safe to call twice.

    Reason: vLLM warns about its own compilation and runner as if they were available here, in each process again. When
    it is asked to end, the task that reads the engine's outputs is cancelled after it may have noticed the engine's
    end, which it logs as an error.
    Remove when: vLLM asks the platform before it warns, and `AsyncLLM.shutdown` cancels `output_handler` first.
    """
    for name in {line.logger for line in _LINES}:
        logging.getLogger(name).addFilter(_UNTRUE)


_announced: list[bool] = []


def announce_engine() -> None:
    """Logs once that an engine starts in a process of its own, which at first logs nothing. Safe to call twice.

    Reason: the first line of an engine comes after its imports, which on a busy machine take a minute; a plugin is
    called in the middle of them, when vLLM has no log yet.
    Remove when: `EngineCoreProc.run_engine_core` logs its start.
    """
    import vllm.envs

    if vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING and not _announced:
        _announced.append(True)
        logger.info(
            "The engine starts in a process of its own. It imports torch and vLLM before its first line below, "
            "as this process has done: seconds, or a minute on a busy machine."
        )
