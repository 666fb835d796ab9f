"""Copies beside the computation, and a graph that is captured meanwhile."""

from __future__ import annotations

import threading

import pytest

from vllm_gaudi_ucm.device.capture_gate import CaptureGate

SECONDS = 5.0


def test_copies_run_together() -> None:
    gate = CaptureGate()
    both = threading.Barrier(2)

    def copy() -> None:
        with gate.copying():
            both.wait(SECONDS)

    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not both.broken


def test_a_save_thread_launches_nothing_while_a_graph_is_captured() -> None:
    """It waits for the capture, as the capture waits for what it had begun."""
    gate = CaptureGate()
    events: list[str] = []
    copying, captured, end = threading.Event(), threading.Event(), threading.Event()

    def save() -> None:
        with gate.copying():
            copying.set()
            end.wait(SECONDS)
            events.append("first copy")
        captured.wait(SECONDS)
        with gate.copying():
            events.append("second copy")

    def capture() -> None:
        copying.wait(SECONDS)
        with gate.capturing():
            captured.set()
            events.append("capture begins")
            late.join(0.1)
            events.append("capture ends")

    late = threading.Thread(target=save)
    other = threading.Thread(target=capture)
    late.start()
    other.start()
    copying.wait(SECONDS)
    end.set()
    late.join(SECONDS)
    other.join(SECONDS)
    assert events == ["first copy", "capture begins", "capture ends", "second copy"]


def test_an_error_opens_the_gate() -> None:
    gate = CaptureGate()
    for enter in (gate.capturing, gate.copying):
        with pytest.raises(ValueError, match="broken"), enter():
            raise ValueError("broken")
    with gate.capturing():
        pass
    with gate.copying():
        pass
