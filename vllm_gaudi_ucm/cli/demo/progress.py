"""The progress bar of `gaudi-ucm demo`: requests done, tokens generated, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_gaudi_ucm.cli.demo.engine import Answer


class DemoProgress:
    """A bar on stderr; its length follows the tokens, so that it moves while long answers are written."""

    def __init__(self, requests: int) -> None:
        text = "{task.fields[done]}/{task.total} requests  {task.fields[tokens]:,} tokens, {task.fields[rate]:.0f}/s"
        self._progress = Progress(
            TextColumn("serving"), BarColumn(), TextColumn(text), TimeElapsedColumn(), console=Console(stderr=True)
        )
        self._task = self._progress.add_task("", total=requests, done=0, requests=requests, tokens=0, rate=0.0)
        self._start = time.perf_counter()

    def show(self, answers: Sequence[Answer]) -> None:
        """Show the state of all requests."""
        tokens = sum(answer.output_tokens for answer in answers)
        self._progress.update(
            self._task,
            completed=sum(answer.progress for answer in answers),
            done=sum(answer.finished for answer in answers),
            tokens=tokens,
            rate=tokens / max(time.perf_counter() - self._start, 1e-9),
        )

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
