"""Several phase logs that are read as one: of the engines of a server, or of its runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from vllm_gaudi_ucm.observability.phase_log import PhaseLogError, PhaseLogReader, different_limit
from vllm_gaudi_ucm.observability.step_record import StepRecord


class JoinedLogs:
    """Logs of servers with the same limits, one after the other. A context manager, for one pass.

    Args:
        paths: of the logs, at least one.
        report: called with the share that has been read, now and then.
        given: limits that are known from elsewhere: the logs may differ in them.

    Raises:
        PhaseLogError: one cannot be read, is named twice, or is of other limits than the first.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        report: Callable[[float], None] = lambda done: None,
        given: Collection[str] = (),
    ) -> None:
        self._report = report
        self._read = 0.0
        twice = next((path for place, path in enumerate(paths) if path in paths[:place]), None)
        if twice is not None:
            raise PhaseLogError(f"{twice}: given twice, expected each log once")
        with ExitStack() as opened:
            self.logs = [opened.enter_context(PhaseLogReader(path, self._report_log, given)) for path in paths]
            self.header = self.logs[0].header
            for log in self.logs[1:]:
                self._check(log, given)
            self._opened = opened.pop_all()

    def __enter__(self) -> JoinedLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def name(self) -> str:
        """The names of the files, for people."""
        return ", ".join(str(log.path) for log in self.logs)

    @property
    def header_place(self) -> str:
        """The place of the limits, for errors."""
        return f"the first line of {self.logs[0].path}"

    def steps(self) -> Iterator[StepRecord]:
        """Steps of all logs, see `PhaseLogReader.steps`."""
        for log in self.logs:
            yield from log.steps()

    def _report_log(self, done: float) -> None:
        """done: share of the log that is being read."""
        self._report((self._read + done) / len(self.logs))
        if done == 1.0:
            self._read += 1

    def _check(self, log: PhaseLogReader, given: Collection[str]) -> None:
        found = different_limit(self.header, log.header, given)
        if found is not None:
            name, here, there = found
            raise PhaseLogError(
                f"{log.path}: {name} is {there!r}, and in {self.logs[0].path} it is {here!r}; expected logs of servers "
                "with the same limits: read them one by one"
            )
