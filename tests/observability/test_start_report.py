"""What a start says of itself: stages, and how far the compilation of kernels is."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from vllm_gaudi_ucm.observability.start_stages import StartStages
from vllm_gaudi_ucm.start.kernel_compilation import kernel_report


def test_a_stage_does_not_count_those_within() -> None:
    times = iter([0.0, 10.0, 12.0, 15.0])
    stages = StartStages(lambda: next(times))
    with stages.measured("model"):
        pass
    with stages.measured("measurement of steps"):
        stages.add("kernels", 2.0)
    assert stages.seconds == {"model": 10.0, "kernels": 2.0, "measurement of steps": 1.0}
    assert stages.line() == "model 10.0 s, kernels 2.0 s, measurement of steps 1.0 s"


def test_a_log_gets_a_line_now_and_then_and_the_last(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    logger, nowhere = logging.getLogger("kernels"), Console(file=io.StringIO())
    with (
        caplog.at_level(logging.INFO, logger="kernels"),
        kernel_report(logger, nowhere, line_seconds=5.0, clock=lambda: now[0]) as told,
    ):
        for done in range(62):
            now[0] = done / 10
            told(done, 61)
    assert caplog.messages == ["Compiling kernels: 50/61", "Compiling kernels: 61/61"]


def test_a_terminal_gets_a_bar() -> None:
    shown = io.StringIO()
    with kernel_report(logging.getLogger("kernels"), Console(file=shown, force_terminal=True, width=80)) as told:
        told(34, 61)
    assert "compiling kernels" in shown.getvalue()
    assert "34/61" in shown.getvalue()
