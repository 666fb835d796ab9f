"""Kernels of all graphs, compiled side by side before the first graph is captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.warm_up.agreement import Agreement


logger = plugin_logger(__name__)


class KernelCompilation(NamedTuple):
    """The result of compiling. found: kernels of the graphs. compiled: kernels that were not on disk yet."""

    found: int = 0
    compiled: int = 0
    seconds: float = 0.0


def compile_kernels(
    executions: Sequence[BucketedExecution],
    largest: Sequence[ForwardShape],
    others: Callable[[], Iterable[ForwardShape]],
    agreement: Agreement,
) -> KernelCompilation:
    """Compiles the kernels that graphs of these shapes launch, if the device has such kernels, and counts them.

    They are found by computing over pads; the results must not be read. On a first start this is done for `largest` and
    for `others`, and all kernels are compiled at once, so that the longest ones are waited for once. It leaves a marker
    file next to the kernels on disk. If there is one, reading a kernel takes a few milliseconds: `others` are not
    computed, unless Triton had to compile after all.

    executions: of the model, and of a draft model.
    agreement: of all workers, because the computation has collectives.
    """
    if not all(execution.compiles_kernels for execution in executions):
        return KernelCompilation()
    from vllm_gaudi_ucm.ops.cuda.side_by_side import compiled_side_by_side

    start = time.perf_counter()
    mark: Path | None = None
    with kernel_report(logger) as report, compiled_side_by_side(report) as found:
        _compute(executions, largest)
        if found.count:
            mark = found.mark()
        is_known = agreement.all_of(mark is None or mark.exists())
        if not is_known:
            _compute_others(executions, others())
    count, compiled = found.count, found.compiled
    if is_known and not agreement.all_of(not compiled):
        with kernel_report(logger) as report, compiled_side_by_side(report) as rest:
            _compute_others(executions, others())
        count, compiled = count + rest.count, compiled + rest.compiled
    if mark is not None:
        _leave(mark)
    done = KernelCompilation(count, compiled, time.perf_counter() - start)
    logger.info("%d kernels, %d of them compiled side by side and the others read from disk, in %.1f s", *done)
    return done


def _compute(executions: Sequence[BucketedExecution], shapes: Iterable[ForwardShape]) -> None:
    for shape in shapes:
        for execution in executions:
            execution.compute_pads(shape)


def _compute_others(executions: Sequence[BucketedExecution], shapes: Iterable[ForwardShape]) -> None:
    _compute(executions, shapes)
    executions[0].compute_remainders()


def _leave(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        logger.debug("the next start looks at every graph for kernels again: %s", error)


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
