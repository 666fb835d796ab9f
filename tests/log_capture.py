"""The loggers that pytest listens to, found once.

Three times for each test, with two handlers, it looks through all loggers for those whose records never reach the root.
Importing vLLM brings thousands of loggers, and this took 22 of the 1,980 s that all tests spent in their own processes.
"""

from __future__ import annotations

import logging

import _pytest.logging


class _CatchingLogs(_pytest.logging.catching_logs[logging.Handler]):
    """pytest's own but for the loggers, which are looked through again where there are more or fewer of them."""

    _loggers = 0
    _apart: tuple[logging.Logger, ...] = ()

    def __enter__(self) -> logging.Handler:
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        for logger in (root, *self._found(root.manager)):
            logger.addHandler(self.handler)
            self.attached_loggers.append(logger)
        return self.handler

    @classmethod
    def _found(cls, manager: logging.Manager) -> tuple[logging.Logger, ...]:
        """Those that do not propagate."""
        if len(manager.loggerDict) != cls._loggers:
            known = [logger for logger in manager.loggerDict.values() if isinstance(logger, logging.Logger)]
            cls._apart = tuple(logger for logger in known if not logger.propagate)
            cls._loggers = len(manager.loggerDict)
        return cls._apart


def find_loggers_once() -> None:
    """From now on, in this process."""
    vars(_pytest.logging)["catching_logs"] = _CatchingLogs
