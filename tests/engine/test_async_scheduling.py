"""Asynchronous scheduling: the next step is planned before the tokens of this one are known, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tests.engine.async_traffic import (
    GROWING,
    IDLE,
    MIX,
    STATIC,
    Arrival,
    Found,
    Watched,
    assert_equal,
    check_stop_strings,
    params,
    start,
)
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

SPARSE_OPTIONS = {
    "GSA": {"reuse_steps": 3},
    "KVStar": {"checkpoint_interval": 3, "lock_duration": 9, "summary": "hash"},
}
WINDOWS = {
    "sparse_steps": "always",
    "min_tokens": 32,
    "local_window_sz": 1,
    "init_window_sz": 1,
    "min_blocks": 1,
    "sparse_ratio": 0.1,
}


@pytest.fixture(scope="module")
def synchronous(tiny_text_model: Path) -> Iterator[Watched]:
    """Steps at true shapes, one after the other."""
    with start(tiny_text_model, {}, is_async=False) as engine:
        assert engine.core.batch_queue is None
        yield Watched(engine)


@pytest.fixture(scope="module")
def expected(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(MIX)


RECIPES = {"graphs": {**STATIC["graphs"], "recipe_check": "fail"}}


@pytest.fixture(scope="module", params=[{}, RECIPES], ids=["true shapes", "static"])
def asynchronous(tiny_text_model: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    with start(tiny_text_model, request.param, is_async=True) as engine:
        assert engine.core.batch_queue_size == 2
        yield Watched(engine)


def test_every_kind_of_request_gets_its_tokens(asynchronous: Watched, expected: list[list[Found]]) -> None:
    """Twice: the second time prompts are found in the prefix cache. covers: A1 A3 A6 A8"""
    for _ in range(2):
        assert_equal(asynchronous.serve(MIX), expected)
    assert asynchronous.queued > 0.8 * asynchronous.schedules
    assert asynchronous.ahead >= 20


def test_requests_that_stop_at_a_text(asynchronous: Watched, expected: list[list[Found]]) -> None:
    """The front end finds it when a step more has been queued, or two."""
    check_stop_strings(asynchronous.engine, expected)


@pytest.fixture(scope="module")
def grown(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(GROWING)


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("shapes", [{}, IDLE], ids=["true shapes", "static"])
def test_preempted_requests(tiny_text_model: Path, grown: list[list[Found]], shapes: dict[str, Any]) -> None:
    """While their last token is still on the device; beside them graphs are warmed in idle gaps. covers: A7"""
    with start(tiny_text_model, shapes, is_async=True, num_gpu_blocks_override=18, max_model_len=256) as engine:
        watched = Watched(engine)
        assert_equal(watched.serve(GROWING), grown)
        assert engine.preemptions > 2
        assert watched.ahead > 20
        # every step was read, so nothing keeps others from the device
        assert not STEPS._is_running
        assert engine.runner.parts.static is None or not engine.runner.parts.static._idle._in_step


@pytest.mark.parametrize("name", SPARSE_OPTIONS)
def test_sparse_choices(tiny_text_model: Path, name: str) -> None:
    """The budget of a step counts the token that is not known yet. covers: C13"""
    config = {name: {**WINDOWS, **SPARSE_OPTIONS[name]}}
    asked = [*MIX[:3], Arrival(0, [7] * 5 + MIX[2].prompt, params(max_tokens=50))]
    found = []
    for shapes, is_async in (({}, False), ({}, True), (STATIC, True)):
        ucm = {**shapes, "ucm_sparse_method": name, "ucm_sparse_config": config}
        with start(tiny_text_model, ucm, is_async) as engine:
            watched = Watched(engine)
            found.append(watched.serve(asked))
            sparse = engine.runner.parts.sparse
            assert sparse is not None
            assert sparse.state is not None
            assert 0 < sparse.state.totals.attended_blocks < sparse.state.totals.context_blocks
            assert (watched.ahead > 20) == is_async
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


SAMPLED_AHEAD: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "min_p": 0.01, "logit_bias": {5: 2.0}},
    {"allowed_token_ids": [5, 6, 7, 8], "min_tokens": 9, "stop_token_ids": [6], "temperature": 1.0},
]


def test_a_step_waits_for_no_token(tiny_text_model: Path, tmp_path: Path) -> None:
    """Each step is recorded once, in order; one that reads past tokens waits for them, and says so: with bad words of
    several tokens, none with anything else that the device samples."""
    reads = {}
    asked = [*SAMPLED_AHEAD, {"bad_words": ["the end of the day"]}]
    for is_async in (False, True):
        log = tmp_path / f"{is_async}.jsonl"
        ucm = {"graphs": {**STATIC["graphs"], "max_graphs": 5}, "phase_log": str(log)}
        with start(tiny_text_model, ucm, is_async) as engine:
            for options in asked:
                engine.generate([[5, 6, 7], [8, 9]], params(max_tokens=9, **options))
        records = read_phase_log(log)[1]
        assert [record.step for record in records] == list(range(len(records)))
        assert all(min(record.plan_ms, record.forward_ms, record.sample_ms) >= 0 for record in records)
        reads[is_async] = [record.host_reads for record in records]
    assert reads[False] == [1] * 9 * len(asked)
    # the first step has no token before it
    assert reads[True] == [0] * 9 * len(SAMPLED_AHEAD) + [0] + [1] * 8


class NeverTwice(LogitsProcessor):
    """Forbids all tokens of a request so far."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for slot in batch_update.removed:
            self._outputs.pop(slot, None)
        for slot, _, _, outputs in batch_update.added:
            self._outputs[slot] = outputs
        for source, target, direction in batch_update.moved:
            assert direction == MoveDirectionality.UNIDIRECTIONAL
            self._outputs[target] = self._outputs.pop(source)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for slot, outputs in self._outputs.items():
            assert min(outputs, default=0) >= 0
            logits[slot, outputs] = float("-inf")
        return logits


@pytest.mark.usefixtures("first_contract")
def test_custom_logits_processors(tiny_text_model: Path) -> None:
    """They read tokens of the step before, which waits for them."""
    asked = [Arrival(2 * index, MIX[index].prompt, params(max_tokens=12)) for index in range(5)]
    found = []
    for shapes, is_async in (({}, False), ({}, True), (STATIC, True)):
        with start(tiny_text_model, shapes, is_async, logits_processors=[NeverTwice]) as engine:
            watched = Watched(engine)
            found.append(watched.serve(asked))
            assert (watched.queued > 5) == is_async
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])
    for (one,) in found[0]:
        assert len(set(one.tokens)) == len(one.tokens)


def test_prompt_logprobs_whose_output_was_dropped(asynchronous: Watched) -> None:
    """A reset of the prefix cache preempts a request whose prompt has just been computed, and drops that step."""
    engine, prompt, asked = asynchronous.engine, MIX[2].prompt, params(prompt_logprobs=1, max_tokens=4)
    (expected,) = engine.generate([prompt], asked)
    for steps in range(1, 6):
        name = engine.new_id()
        engine.add(name, prompt, asked)
        outputs = [one for _ in range(steps) for one in engine.step()]
        engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        while engine.llm.llm_engine.has_unfinished_requests():
            outputs += engine.step()
        found = [[*(scores or ())] for scores in outputs[-1].prompt_logprobs or ()]
        assert found == [[*(scores or ())] for scores in expected.prompt_logprobs or ()], f"after {steps} steps"
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
