"""Sparse methods in the engine: scheduler, runner and attention together, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.sparse import OPTIONS, PROMPTS, STATIC, tokens
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines


WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
# base options of each method; the ratio comes from the test
METHODS: dict[str, dict[str, Any]] = {
    "GSA": WINDOWS,
    "GSA reused": {**WINDOWS, "reuse_steps": 4, "reuse_layers": 2},
    "GSA dense layer": {**WINDOWS, "dense_layers": [0], "summary": "minmax"},
    "ESA": {**WINDOWS, "summary": "codes"},
    "KVStar": {**WINDOWS, "checkpoint_interval": 3, "lock_duration": 9, "summary": "hash"},
}


def ucm(name: str, ratio: float, static: bool = False, **more: Any) -> dict[str, Any]:
    method = name.split()[0]
    config: dict[str, Any] = {
        "ucm_sparse_method": method,
        "ucm_sparse_config": {method: {**METHODS[name], "sparse_ratio": ratio}},
        **more,
    }
    return {**config, "graphs": STATIC} if static else config


ARRIVALS = range(0, 2 * len(PROMPTS), 2)
# of an answer at static shapes: more than a block
LONGER = 18


@pytest.fixture(scope="module")
def dense(tiny_llama: Path) -> Iterator[list[Answer]]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        yield engine.staggered(PROMPTS, ARRIVALS, 30)


# At static shapes all methods choose what they choose at true shapes (below), where a budget is of any size: of all
# blocks with those that choose again only now and then.
BUDGETS = [(name, False) for name in METHODS] + [(name, True) for name in ("GSA reused", "KVStar")]


@pytest.mark.parametrize(
    ("name", "static"), BUDGETS, ids=[f"{name}-{'static' if static else 'true shapes'}" for name, static in BUDGETS]
)
def test_a_budget_of_all_blocks_gives_dense_tokens(
    tiny_llama: Path, dense: list[Answer], name: str, static: bool, tmp_path: Path
) -> None:
    """covers: C13 C16 C22 C24. Prompts in chunks, prefix hits and decodes in one batch."""
    log = tmp_path / "phases.jsonl"
    with Engine(tiny_llama, ucm(name, 1.0, static, phase_log=str(log)), **OPTIONS) as engine:
        count = LONGER if static else 30
        found = engine.staggered(PROMPTS, ARRIVALS, count)
        engine.check_idle()
    assert_same(found, [answer.first(count) for answer in dense])
    assert any(record.bucket.selected_blocks for record in read_phase_log(log)[1])


@pytest.mark.parametrize("name", METHODS)
def test_static_shapes_choose_what_true_shapes_choose(tiny_llama: Path, dense: list[Answer], name: str) -> None:
    found = []
    for static in (False, True):
        with Engine(tiny_llama, ucm(name, 0.4, static), **OPTIONS) as engine:
            found.append(engine.staggered(PROMPTS, ARRIVALS, LONGER))
            if engine.runner.static is not None:
                assert len(engine.runner.static.execution.ready.buckets.forward) > 3, "too few graphs for its phases"
    assert_same(found[1], found[0], near_ties=2)
    # short contexts are dense; long ones lose blocks that count in a model of random weights
    expected = [answer.first(LONGER) for answer in dense]
    assert_same(found[0][:2], expected[:2])
    assert any(one.tokens != other.tokens for one, other in zip(found[0], expected, strict=True))


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_below_the_minimum_and_when_switched_off_every_bit_is_dense(
    tiny_llama: Path, dense: list[Answer], static: bool
) -> None:
    """A method has buckets of its own: at static shapes other pads, beside which a product may round otherwise."""
    graphs = {"graphs": {**STATIC, "max_graphs": 6}} if static else {}
    config = {**ucm("GSA", 0.1), **graphs}
    with Engine(tiny_llama, graphs, **OPTIONS) as engine:
        expected = engine.alone(PROMPTS[4:6], 18)
    off = greedy_params(18)
    off.extra_args = {"ucm_sparse": False}
    with Engine(tiny_llama, config, **OPTIONS) as engine:
        found = [engine.generate([prompt], off)[0].outputs[0] for prompt in PROMPTS[4:6]]
    assert [list(answer.token_ids) for answer in found] == [answer.tokens for answer in expected]
    for answer, dense_answer in zip(found, expected, strict=True):
        logprobs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert logprobs == (pytest.approx(dense_answer.logprobs, abs=1e-5) if static else dense_answer.logprobs)


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("name", ["GSA", "KVStar"])
def test_preempted_requests_end_like_others(tiny_llama: Path, name: str) -> None:
    """covers: C5. A cache so small that requests lose their blocks, and take other ones."""
    growing, found = [tokens(60 + 3 * count) for count in range(6)], []
    for config in ({}, ucm(name, 1.0)):
        with Engine(tiny_llama, config, **OPTIONS, num_gpu_blocks_override=34) as engine:
            found.append(engine.greedy(growing, 90))
            assert engine.preemptions
            engine.check_idle()
    assert_same(found[1], found[0])


def test_aborted_requests_leave_nothing(tiny_llama: Path, dense: list[Answer]) -> None:
    """covers: C5 C9. An id that is used again gets its own answer."""
    with Engine(tiny_llama, ucm("KVStar", 1.0), **OPTIONS) as engine:
        engine.add("again", PROMPTS[5], greedy_params(30))
        for _ in range(12):
            engine.step()
        engine.llm.llm_engine.abort_request(["again"])
        engine.add("again", PROMPTS[4], greedy_params(30))
        finished = []
        while not finished:
            finished = [output for output in engine.step() if output.finished]
        engine.check_idle()
    assert list(finished[0].outputs[0].token_ids) == dense[4].tokens


def test_a_wrong_switch_is_refused_and_other_requests_go_on(tiny_llama: Path) -> None:
    """covers: D5"""
    with Engine(tiny_llama, ucm("GSA", 0.3), **OPTIONS) as engine:
        with pytest.raises(VLLMValidationError, match="ucm_sparse"):
            engine.generate([PROMPTS[3]], SamplingParams(max_tokens=2, extra_args={"ucm_sparse": "no"}))
        assert len(engine.greedy([PROMPTS[3]], 5)[0].tokens) == 5
