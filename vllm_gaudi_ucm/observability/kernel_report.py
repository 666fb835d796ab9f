"""Reports progress of compiling kernels: a bar on a terminal, otherwise lines in the log."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Seconds between two lines of a log.
LINE_SECONDS = 5.0


@contextmanager
def kernel_report(
    logger: logging.Logger,
    console: Console | None = None,
    line_seconds: float = LINE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with the number of compiled kernels, and of all.

    console: where a bar is drawn if it is a terminal; stderr if None. Without one a line is logged at most every
    `line_seconds`, and one when all are compiled.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(logger, line_seconds, clock).tell
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling kernels", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, logger: logging.Logger, line_seconds: float, clock: Callable[[], float]) -> None:
        self._logger, self._line_seconds, self._clock = logger, line_seconds, clock
        self._last = clock()

    def tell(self, done: int, total: int) -> None:
        now = self._clock()
        if done == total or now - self._last >= self._line_seconds:
            self._last = now
            self._logger.info("Compiling kernels: %d/%d", done, total)
