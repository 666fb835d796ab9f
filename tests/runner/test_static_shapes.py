"""What static shapes count while their buckets are warmed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.records import GraphRecord, GraphState, WarmUpProgress, WarmUpSummary
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes


def test_graphs_for_remainders_are_counted_with_the_buckets() -> None:
    shape = ForwardShape("cs-", 16, 4, 0, 5)
    states = {
        shape: GraphState.COLD,
        RemainderShape(shape): GraphState.WARM,
        8: GraphState.WARM,
        16: GraphState.DROPPED,
    }
    summary = WarmUpSummary(tuple(GraphRecord(key, state) for key, state in states.items()), 2, 1.5)
    counted: list[tuple[Any, ...]] = []
    static: Any = SimpleNamespace(
        _report=lambda progress: None,
        _metrics=SimpleNamespace(warm_up=lambda *figures: counted.append(figures)),
        summary=lambda: summary,
    )
    StaticShapes._on_progress(static, WarmUpProgress("rest", 2, 4, None, None, 3.0, None, 0))
    assert counted == [(2, 3, 3.0, 1.5)]


def test_what_a_failed_warm_up_compiled_is_no_steps() -> None:
    """covers: B10. The next step would be said to have compiled it."""
    counted = [0]
    device = SimpleNamespace(
        enter_thread=lambda: None,
        compilations=lambda: counted[0],
        synchronize=lambda: None,
        capturing=nullcontext,
    )
    static: Any = SimpleNamespace(_device=device, stages=SimpleNamespace(warming=nullcontext), _compiled=0)

    def run() -> None:
        counted[0] += 3
        raise MemoryError

    with pytest.raises(MemoryError):
        StaticShapes._warm(static, run)
    assert static._compiled == 3
