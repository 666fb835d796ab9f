"""Asynchronous scheduling: the next step is planned before the tokens of this one are known, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.serving import NEAR_TIE, Engine
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

STATIC: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 15, "warm_up": "full", "recipe_check": "fail"}}
IDLE: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 15, "warm_up": "idle"}}
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
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": False,
    "max_logprobs": 20,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
DIGITS = StructuredOutputsParams(regex=r"\d{9}")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})


class Arrival(NamedTuple):
    """A request that comes before a step, and is aborted once it has so many tokens."""

    step: int
    prompt: list[int]
    params: SamplingParams
    aborted_at: int | None = None


class Found(NamedTuple):
    """Of one completion."""

    tokens: list[int]
    logprobs: list[float]
    reason: str | None


def prompts(seed: int, count: int) -> list[list[int]]:
    """Longer than a step, some with a beginning in common, over several blocks."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 200) for _ in range(70)]
    return [
        common[: 35 * (index % 3)] + [rng.randrange(3, 200) for _ in range(rng.randrange(1, 100))]
        for index in range(count)
    ]


ASKED = [
    params(),
    params(temperature=1.0, seed=7, max_tokens=17),
    params(logprobs=3),
    params(temperature=0.8, seed=8, top_k=20, presence_penalty=0.5, logprobs=0),
    params(repetition_penalty=1.3, frequency_penalty=0.2),
    params(max_tokens=1),
    params(structured_outputs=DIGITS, ignore_eos=False),
    params(temperature=1.0, seed=9, structured_outputs=DIGITS, ignore_eos=False),
    params(temperature=1.0, seed=3, min_tokens=6, stop_token_ids=list(range(0, 4000, 2))),
    params(temperature=1.0, seed=4, n=2),
    params(bad_words=["the"], logit_bias={30: 2.0}),
    params(prompt_logprobs=0, max_tokens=4),
    params(max_tokens=40),
    params(temperature=1.0, seed=5, min_p=0.1, top_p=0.9),
]
MIX = [
    Arrival(2 * i, prompt, asked) for i, (prompt, asked) in enumerate(zip(prompts(1, len(ASKED)), ASKED, strict=True))
]
MIX += [Arrival(3 * i, prompt, params(max_tokens=30), 4 + i) for i, prompt in enumerate(prompts(5, 3))]
# all of them do not fit in the end
GROWING = [Arrival(0, prompt[-20:], params(max_tokens=60)) for prompt in prompts(2, 5)]
GROWING += [Arrival(0, prompts(3, 1)[0][-20:], params(temperature=1.0, seed=1, max_tokens=20))]


class Watched:
    """An engine, and how often a step was scheduled.

    queued: times while one was in flight. ahead: times with tokens that the host did not have.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.schedules, self.queued, self.ahead = engine, 0, 0, 0
        core, schedule = engine.core, engine.core.scheduler.schedule
        self._steps = engine.runner.parts.steps

        def counted(*args: Any, **options: Any) -> Any:
            self.schedules += 1
            in_flight = any(not future.done() for future, *_ in core.batch_queue or ())
            self.queued += in_flight
            self.ahead += in_flight and self._unread() > 0
            return schedule(*args, **options)

        core.scheduler.schedule = counted

    def _unread(self) -> int:
        """Tokens that the table has stand-ins for."""
        requests = self._steps.requests.requests.values()
        return sum(token < 0 for request in requests for token in request.output_token_ids)

    def serve(self, arrivals: Sequence[Arrival]) -> list[list[Found]]:
        """The completions of each request, in order."""
        engine, found = self.engine, dict[str, RequestOutput]()
        names = [engine.new_id() for _ in arrivals]
        live = engine.llm.llm_engine
        step = 0
        while step <= max(arrival.step for arrival in arrivals) or live.has_unfinished_requests():
            for name, arrival in zip(names, arrivals, strict=True):
                if arrival.step == step:
                    engine.add(name, arrival.prompt, arrival.params)
            for output in engine.step():
                found[output.request_id] = output
                arrival = arrivals[names.index(output.request_id)]
                if arrival.aborted_at is not None and len(output.outputs[0].token_ids) >= arrival.aborted_at:
                    live.abort_request([output.request_id], internal=False)
            step += 1
        # what has ended in the last step is told with the next one
        engine.greedy([[1, 2, 3]], 2)
        engine.check_idle()
        return [completions(found[name], arrival) for name, arrival in zip(names, arrivals, strict=True)]


def completions(output: RequestOutput, arrival: Arrival) -> list[Found]:
    found = []
    for one in sorted(output.outputs, key=lambda one: one.index):
        tokens = list(one.token_ids)[: arrival.aborted_at]
        scores = [entry[token].logprob for token, entry in zip(tokens, one.logprobs or (), strict=False)]
        found.append(Found(tokens, scores, None if arrival.aborted_at else one.finish_reason))
    return found


def start(model: Path, ucm: Mapping[str, Any], is_async: bool, **options: Any) -> Engine:
    """It has to be asked for."""
    scheduler = {"async_scheduling": is_async}
    return Engine(model, {**ucm, "scheduler": scheduler}, **{**OPTIONS, **options})


def assert_equal(found: Sequence[Sequence[Found]], expected: Sequence[Sequence[Found]]) -> None:
    for index, (some, others) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            assert (one.tokens, one.reason) == (other.tokens, other.reason), f"request {index}"
            assert one.logprobs == pytest.approx(other.logprobs, abs=NEAR_TIE)


@pytest.fixture(scope="module")
def synchronous(tiny_text_model: Path) -> Iterator[Watched]:
    """Steps at true shapes, one after the other."""
    with start(tiny_text_model, {}, is_async=False) as engine:
        assert engine.core.batch_queue is None
        yield Watched(engine)


@pytest.fixture(scope="module")
def expected(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(MIX)


@pytest.fixture(scope="module", params=[{}, STATIC], ids=["true shapes", "static"])
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
    texts = [output.outputs[0].text for output in asynchronous.engine.generate([MIX[0].prompt], params(max_tokens=24))]
    stop = texts[0][len(texts[0]) // 2 :][:4]
    first, other = asynchronous.engine.generate([MIX[0].prompt, MIX[2].prompt], [params(stop=[stop]), params()])
    assert first.outputs[0].finish_reason == "stop"
    assert texts[0].startswith(first.outputs[0].text)
    assert stop not in first.outputs[0].text
    assert list(first.outputs[0].token_ids) == expected[0][0].tokens[: len(first.outputs[0].token_ids)]
    assert list(other.outputs[0].token_ids) == expected[2][0].tokens
    asynchronous.engine.greedy([[1, 2, 3]], 2)
    asynchronous.engine.check_idle()


@pytest.fixture(scope="module")
def grown(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(GROWING)


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
        with start(tiny_text_model, {**STATIC, "phase_log": str(log)}, is_async) as engine:
            for options in asked:
                engine.generate([[5, 6, 7], [8, 9]], params(max_tokens=9, **options))
        records = read_phase_log(log)[1]
        assert [record.step for record in records] == list(range(len(records)))
        assert all(min(record.plan_ms, record.forward_ms, record.sample_ms) >= 0 for record in records)
        reads[is_async] = [record.host_reads for record in records]
    assert reads[False] == [1] * 9 * len(asked)
    # the first step has no token before it
    assert reads[True] == [0] * 9 * len(SAMPLED_AHEAD) + [0] + [1] * 8
