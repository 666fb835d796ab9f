"""Asynchronous scheduling with workers in processes of their own, of which one has its outputs read, in another thread.

Several workers compare what they run, their logits and their tokens in each step (`ucm.distributed.check_ranks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.async_ranks import CHECKED, ApartEngine, check, watch
from tests.engine.async_traffic import (
    GROWING,
    IDLE,
    MIX,
    Arrival,
    Found,
    assert_equal,
    check_stop_strings,
    params,
    serve,
    start,
)

pytestmark = pytest.mark.slow  # starts engines with several processes


SPARSE: dict[str, Any] = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {
        "GSA": {
            "sparse_steps": "always",
            "min_tokens": 32,
            "local_window_sz": 1,
            "init_window_sz": 1,
            "min_blocks": 1,
            "sparse_ratio": 0.1,
        }
    },
}


def cold_graphs(worker: Any) -> int:
    """In a worker."""
    return len(worker.model_runner.static.execution.ready.cold)


@pytest.fixture(scope="module")
def expected(tiny_text_model: Path) -> tuple[list[list[Found]], list[list[Found]]]:
    """Of one worker whose steps follow each other."""
    with start(tiny_text_model, {}, is_async=False) as engine:
        return serve(engine, MIX), serve(engine, GROWING)


def test_two_workers(tiny_text_model: Path, expected: tuple[list[list[Found]], list[list[Found]]]) -> None:
    """Every kind of request, once the engine's loop has warmed all graphs; in every step both have the same tokens."""
    ucm = {"graphs": {**IDLE["graphs"], "max_graphs": 6, "skeleton": 2}, **CHECKED}
    with start(tiny_text_model, ucm, True, ApartEngine, tensor_parallel_size=2) as engine:
        assert engine.core.batch_queue_size == 2
        for _ in range(2000):
            if not engine.core.scheduler.has_requests():
                break
            engine.core.step_fn()
        assert engine.llm.collective_rpc(cold_graphs) == [0, 0]
        engine.llm.collective_rpc(watch)
        assert_equal(serve(engine, MIX), expected[0])
        check_stop_strings(engine, expected[0])
        (steps, _), (others, ahead) = (seen for seen, *_ in engine.llm.collective_rpc(check))
        assert steps == others
        # nobody reads the second worker's tokens before their step is two back
        assert ahead > 0.6 * steps


def test_sparse_choices_of_two_workers(tiny_text_model: Path) -> None:
    """At true shapes."""
    asked = [*MIX[:3], Arrival(0, [7] * 5 + MIX[2].prompt, params(max_tokens=50))]
    with start(tiny_text_model, SPARSE, is_async=False) as engine:
        alone = serve(engine, asked)
        sparse = engine.runner.parts.sparse
        assert sparse is not None
        assert sparse.state is not None
        assert 0 < sparse.state.totals.attended_blocks < sparse.state.totals.context_blocks
    with start(tiny_text_model, {**SPARSE, **CHECKED}, True, ApartEngine, tensor_parallel_size=2) as engine:
        engine.llm.collective_rpc(watch)
        assert_equal(serve(engine, asked), alone)
        (steps, _), (others, ahead) = (seen for seen, *_ in engine.llm.collective_rpc(check))
        assert steps == others
        assert ahead > 0.6 * steps


def test_a_worker_in_a_process_of_its_own(
    tiny_text_model: Path, expected: tuple[list[list[Found]], list[list[Found]]]
) -> None:
    """With requests that are preempted, and graphs that are warmed in idle gaps."""
    tight: dict[str, Any] = {"num_gpu_blocks_override": 18, "max_model_len": 256}
    with start(tiny_text_model, IDLE, True, ApartEngine, distributed_executor_backend="mp", **tight) as engine:
        assert engine.core.batch_queue_size == 2
        engine.llm.collective_rpc(watch)
        assert_equal(serve(engine, GROWING), expected[1])
        assert engine.preemptions > 2
