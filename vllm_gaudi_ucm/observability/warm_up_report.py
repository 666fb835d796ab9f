"""Says how a warm-up goes: a bar on a terminal while the start waits for it, otherwise lines in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vllm_gaudi_ucm.graphs.warm_up.graph_key import graph_name
from vllm_gaudi_ucm.graphs.warm_up.progress import Stage, WarmUpProgress
from vllm_gaudi_ucm.graphs.warm_up.summary import GraphRecord, GraphState

GIB = 2**30
# A log that nobody watches gets a line in this many seconds, and one at the end of each stage.
LINE_SECONDS = 5.0
STAGES: dict[Stage, str] = {"skeleton": "warm-up, first buckets", "rest": "warm-up, other buckets"}


class WarmUpReport:
    """Takes the reports of a `WarmUp`, from whichever thread it runs in.

    Args:
        logger: gets the lines; one at once for every bucket that is dropped or fails.
        console: where a bar is drawn if it is a terminal; stderr if None.
        line_seconds: least time between two lines of progress.
        clock: seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        console: Console | None = None,
        line_seconds: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._console = console or Console(stderr=True)
        self._line_seconds = line_seconds
        self._clock = clock
        self._last_line = clock()
        self._bar: Progress | None = None
        self._tasks: dict[Stage, TaskID] = {}

    def __call__(self, progress: WarmUpProgress) -> None:
        if progress.ended is not None:
            self._log_loss(progress.ended)
        if self._bar is not None:
            self._move(self._bar, progress)
        elif self._is_due(progress):
            self._logger.info("%s", progress_line(progress))

    @contextmanager
    def bar(self) -> Iterator[None]:
        """For a warm-up that the start waits for: a bar instead of lines while the block runs, on a terminal only."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._console) as self._bar:
            try:
                yield
            finally:
                self._bar = None
                self._tasks.clear()

    def _move(self, bar: Progress, progress: WarmUpProgress) -> None:
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = bar.add_task(STAGES[progress.stage], total=progress.total, figures="")
        bar.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total, figures=_figures(progress)
        )

    def _is_due(self, progress: WarmUpProgress) -> bool:
        now, is_last = self._clock(), progress.ended is not None and progress.done == progress.total
        if not is_last and now - self._last_line < self._line_seconds:
            return False
        self._last_line = now
        return True

    def _log_loss(self, record: GraphRecord) -> None:
        if record.state is GraphState.DROPPED:
            self._logger.info("Warm-up leaves out %s: %s", graph_name(record.key), record.reason)
        elif record.state is GraphState.FAILED:
            self._logger.warning(
                "Warm-up of %s failed after %.1f s; its steps run in a larger one: %s",
                graph_name(record.key),
                record.seconds,
                record.reason,
            )


def progress_line(progress: WarmUpProgress) -> str:
    """Done / total, seconds, time left, free memory and the graph that is being warmed, for a log."""
    what = STAGES[progress.stage].capitalize()
    return f"{what}: {progress.done}/{progress.total} graphs, {progress.seconds:.1f} s, {_figures(progress)}"


def _figures(progress: WarmUpProgress) -> str:
    left = [] if progress.seconds_left is None else [f"about {progress.seconds_left:.0f} s left"]
    now = [] if progress.current is None else [f"now {graph_name(progress.current)}"]
    return ", ".join([*left, f"{progress.free_memory / GIB:.1f} GiB free", *now])
