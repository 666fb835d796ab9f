"""vLLM's MultiConnector on our runner: our connector and the offloading one as children of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES
from tests.engine.broken_connector import BrokenConnector
from tests.engine.connector import gsa
from tests.engine.multi_connector import multi, offloading, ours, shared
from tests.engine.serving import Answer, Engine, assert_same
from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.connector.scheduler_side import SchedulerSide
from vllm_gaudi_ucm.observability.room_metrics import TransferTotals
from vllm_gaudi_ucm.scheduler.scheduler import UcmScheduler

pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 12
WHOLE = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@SHAPES
def test_both_keep_blocks_and_the_first_that_has_them_loads(
    tiny_llama: Path, expected: list[Answer], tmp_path: Path, ucm: dict[str, Any]
) -> None:
    """The device's cache holds one prompt: others come from host memory, and in a second server from our files."""
    hits = []
    for _ in range(2):
        config = multi(offloading(), ours(tmp_path))
        with Engine(tiny_llama, ucm, kv_transfer_config=config, num_gpu_blocks_override=17, **OPTIONS) as engine:
            assert isinstance(engine.core.scheduler, UcmScheduler)
            assert engine.core.scheduler.recompute_kv_load_failures
            for _ in range(2):
                found = engine.alone(PROMPTS, OUTPUTS)
                assert_same(found, expected)
                hits.append([answer.cached_tokens for answer in found])
            for _ in range(3):
                engine.step()
            engine.check_idle()
            loaded = moved_by_ours(engine).loaded
    assert hits[0] == [0] * len(PROMPTS)
    assert hits[1][3] >= 128
    assert hits[2] == WHOLE
    assert loaded == sum(WHOLE) // 16


def moved_by_ours(engine: Engine) -> TransferTotals:
    assert engine.runner.transfer is not None
    ours = our_connector(engine.runner.transfer.connector)
    assert ours is not None
    return ours.worker.totals()


def test_waiting_requests_are_prefetched_for_a_child(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: B4"""
    planned = []
    plan = SchedulerSide.plan_prefetch

    def noted(side: SchedulerSide, waiting: Any) -> None:
        waiting = list(waiting)
        planned.append(len(waiting))
        plan(side, waiting)

    monkeypatch.setattr(SchedulerSide, "plan_prefetch", noted)
    nested: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    nested["kv_connector_extra_config"] = {"connectors": [ours(tmp_path)]}
    with Engine(tiny_llama, kv_transfer_config=multi(shared(tmp_path), nested), **OPTIONS) as engine:
        engine.greedy(2 * PROMPTS, 2)
    assert max(planned) > 4


def test_loaded_blocks_are_chosen_among_whoever_has_loaded_them(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: C11. Blocks without summaries are attended in full: with those of a child a step has all."""
    answers = []
    for config in (None, multi(ours(tmp_path), shared(tmp_path)), multi(ours(tmp_path), shared(tmp_path))):
        with Engine(tiny_llama, gsa(1.0), kv_transfer_config=config, **OPTIONS) as engine:
            answers.append(engine.alone(PROMPTS, OUTPUTS))
    assert_same(answers[1], answers[0])
    assert_same(answers[2], answers[0])
    assert [answer.cached_tokens for answer in answers[2]] == WHOLE


@SHAPES
def test_a_step_with_blocks_that_another_child_has_not_loaded_stores_none(
    tiny_llama: Path, expected: list[Answer], tmp_path: Path, ucm: dict[str, Any]
) -> None:
    """covers: C8 D3. It has computed with what nobody has written; what is computed again is right, and is stored."""
    with Engine(tiny_llama, ucm, kv_transfer_config=multi(shared(tmp_path)), **OPTIONS) as engine:
        engine.alone(PROMPTS, OUTPUTS)
    broken = BrokenConnector
    broken.failures = 0
    config = multi(shared(tmp_path, BrokenConnector), ours(tmp_path))
    with Engine(tiny_llama, ucm, kv_transfer_config=config, **OPTIONS) as engine:
        assert_same(engine.alone(PROMPTS, OUTPUTS), expected)
    assert broken.failures == sum(count > 0 for count in WHOLE)
    with Engine(tiny_llama, ucm, kv_transfer_config=multi(ours(tmp_path)), **OPTIONS) as engine:
        found = engine.alone(PROMPTS, OUTPUTS)
    assert_same(found, expected)
