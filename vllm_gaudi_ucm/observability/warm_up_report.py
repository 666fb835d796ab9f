"""Reports progress of a warm-up: a bar on a terminal while the start waits for it, otherwise lines in the log."""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.records import (
    GraphKey,
    GraphRecord,
    GraphState,
    WarmUpProgress,
    WarmUpStage,
    WarmUpSummary,
    graph_name,
)
from vllm_gaudi_ucm.observability.phase_summary import phase_text
from vllm_gaudi_ucm.observability.step_metrics import BucketColumns

GIB = 2**30
# Seconds between two lines of a log; the end of each stage has one, too.
LINE_SECONDS = 5.0
STAGES: dict[WarmUpStage, str] = {"skeleton": "warm-up, first buckets", "rest": "warm-up, other buckets"}


class WarmUpReport:
    """Takes the reports of a `WarmUp`, from any thread.

    Args:
        logger: gets the lines; one immediately for every bucket that is dropped or fails.
        console: where a bar is drawn if it is a terminal; stderr if None.
        line_seconds: least time between two lines of progress.
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
        self._tasks: dict[WarmUpStage, TaskID] = {}

    def __call__(self, progress: WarmUpProgress) -> None:
        if progress.ended is not None:
            self._log_loss(progress.ended)
        if self._bar is not None:
            self._move(self._bar, progress)
        elif self._is_due(progress):
            self._logger.info("%s", progress_line(progress))

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Shows a bar instead of lines while the block runs, only on a terminal: for a warm-up before the start."""
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


MIB = 2**20
STATE_STYLES = {
    GraphState.WARM: "green",
    GraphState.COLD: "dim",
    GraphState.DROPPED: "yellow",
    GraphState.FAILED: "bold red",
}


def summary_line(summary: WarmUpSummary) -> str:
    """Summarises how many graphs are warm, their time and memory, and the state of the others."""
    count = summary.count
    parts = [
        f"{count(GraphState.WARM)} of {len(summary.records)} graphs are warm after {summary.seconds:.1f} s, the first "
        f"{summary.skeleton_graphs} after {summary.skeleton_seconds:.1f} s; they take {summary.size / GIB:.2f} GiB"
    ]
    others = (GraphState.COLD, GraphState.DROPPED, GraphState.FAILED)
    parts += [f"{count(state)} {state}" for state in others if count(state)]
    return ", ".join(parts)


def warm_up_table(summary: WarmUpSummary) -> Table:
    """Returns one line per graph: forward, prompt remainders, logits rows; each in ascending order of cost."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("graph", no_wrap=True)
    columns = BucketColumns.from_shapes(_shapes(summary))
    for heading in (*columns.headings, "logits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("seconds", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for record in summary.records:
        table.add_row(*_sizes(record.key, columns), Text(record.state, STATE_STYLES[record.state]), *_cells(record))
    return table


def warm_up_text(summary: WarmUpSummary) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(warm_up_table(summary))
    lines = [line.rstrip() for line in capture.get().splitlines() if line.strip()]
    return "\n".join([*lines, summary_line(summary)])


def _shapes(summary: WarmUpSummary) -> Iterator[ForwardShape]:
    for record in summary.records:
        if not isinstance(record.key, int):
            yield record.key.forward if isinstance(record.key, RemainderShape) else record.key


def _sizes(key: GraphKey, columns: BucketColumns) -> list[Text | str]:
    if isinstance(key, RemainderShape):
        return [phase_text(key.forward.phase).append(" prompt remainder"), *columns.cells(key.forward), ""]
    if isinstance(key, ForwardShape):
        return [phase_text(key.phase), *columns.cells(key), ""]
    return ["logits", *[""] * len(columns.names), f"{key:,}"]


def _cells(record: GraphRecord) -> list[Text | str]:
    measured = record.state is GraphState.WARM
    seconds = f"{record.seconds:.2f}" if record.seconds else ""
    return [seconds, f"{record.size / MIB:,.0f}" if measured else "", Text(record.reason)]
