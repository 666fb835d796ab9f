"""Lines of vLLM's log that are left out, and others that stay."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest

from vllm_gaudi_ucm.vllm_api import child_watch
from vllm_gaudi_ucm.vllm_api.child_watch import ChildWatch
from vllm_gaudi_ucm.vllm_api.log_lines import leave_out_untrue_lines

NUMBERS = itertools.count(5_000_000)  # more than any process has
FAILED = "AsyncLLM output_handler failed."


class Records(logging.Handler):
    """The messages of some loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Engine:
    """A process; status: None while it runs."""

    def __init__(self, status: int | None) -> None:
        self.name, self.pid, self.exitcode = "EngineCore", next(NUMBERS), status

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.fixture
def records() -> Iterator[Records]:
    leave_out_untrue_lines()
    leave_out_untrue_lines()
    found = Records()
    loggers = [logging.getLogger(name) for name in ("vllm.config.vllm", "vllm.v1.engine.async_llm")]
    for logger in loggers:
        logger.addHandler(found)
    yield found
    for logger in loggers:
        logger.removeHandler(found)


def watch_of(monkeypatch: pytest.MonkeyPatch, *statuses: int | None) -> list[Any]:
    """The engines of this process, by their ends."""
    children: list[Any] = [Engine(status) for status in statuses]
    watch = ChildWatch(lambda: cast("list[BaseProcess]", children), lambda engine: None)
    watch.look()
    monkeypatch.setattr(child_watch, "_watch", watch)
    return children


def test_warnings_that_are_not_of_a_user_are_left_out(records: Records) -> None:
    logger = logging.getLogger("vllm.config.vllm")
    logger.warning("Inductor compilation was disabled by user settings, optimizations settings are ignored.")
    logger.warning("Model Runner V2 requires Triton; using the V1 model runner instead.")
    logger.warning("Model Runner V2 does not yet support %s", "this")
    assert records.messages == ["Model Runner V2 does not yet support this"]


@pytest.mark.parametrize(
    ("statuses", "is_shown"), [((), True), ((0,), False), ((-15,), False), ((1,), True), ((0, -9), True)]
)
def test_the_end_of_an_engine_is_an_error_unless_it_was_asked_for(
    records: Records, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], is_shown: bool
) -> None:
    watch_of(monkeypatch, *statuses)
    logging.getLogger("vllm.v1.engine.async_llm").error(FAILED)
    assert records.messages == ([FAILED] if is_shown else [])


def test_an_engine_that_fails_is_not_excused_by_the_signal_that_follows(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks it to end while it closes its workers, which kills it; the server's status is 1."""
    (engine,) = watch_of(monkeypatch, None)
    logging.getLogger("vllm.v1.engine.async_llm").error(FAILED)
    assert records.messages == [FAILED]
    engine.exitcode = -15
    assert child_watch.failed_children() == ["EngineCore"]
