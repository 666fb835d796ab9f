"""Traffic for engines that schedule ahead: every kind of request, and what each gets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.serving import NEAR_TIE, Engine

STATIC: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 10, "warm_up": "full"}}
IDLE: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 15, "warm_up": "idle"}}
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
        return serve(self.engine, arrivals)


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> list[list[Found]]:
    """The completions of each request, in order."""
    names = [engine.new_id() for _ in arrivals]
    # an output tells of some of its request's completions
    found: dict[str, dict[int, CompletionOutput]] = {name: {} for name in names}
    live = engine.llm.llm_engine
    step = 0
    while step <= max(arrival.step for arrival in arrivals) or live.has_unfinished_requests():
        for name, arrival in zip(names, arrivals, strict=True):
            if arrival.step == step:
                engine.add(name, arrival.prompt, arrival.params)
        for output in engine.step():
            found[output.request_id].update((one.index, one) for one in output.outputs)
            arrival = arrivals[names.index(output.request_id)]
            if arrival.aborted_at is not None and len(output.outputs[0].token_ids) >= arrival.aborted_at:
                live.abort_request([output.request_id], internal=False)
        step += 1
    # what has ended in the last step is told with the next one
    engine.greedy([[1, 2, 3]], 2)
    engine.check_idle()
    return [completions(found[name], arrival) for name, arrival in zip(names, arrivals, strict=True)]


def completions(outputs: Mapping[int, CompletionOutput], arrival: Arrival) -> list[Found]:
    found = []
    assert sorted(outputs) == list(range(arrival.params.n))
    for _, one in sorted(outputs.items()):
        tokens = list(one.token_ids)[: arrival.aborted_at]
        scores = [entry[token].logprob for token, entry in zip(tokens, one.logprobs or (), strict=False)]
        found.append(Found(tokens, scores, None if arrival.aborted_at else one.finish_reason))
    return found


def start(model: Path, ucm: Mapping[str, Any], is_async: bool, kind: type[Engine] = Engine, **options: Any) -> Engine:
    """It has to be asked for."""
    scheduler = {"async_scheduling": is_async}
    return kind(model, {**ucm, "scheduler": scheduler}, **{**OPTIONS, **options})


def assert_equal(found: Sequence[Sequence[Found]], expected: Sequence[Sequence[Found]]) -> None:
    for index, (some, others) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            assert (one.tokens, one.reason) == (other.tokens, other.reason), f"request {index}"
            assert one.logprobs == pytest.approx(other.logprobs, abs=NEAR_TIE)


def check_stop_strings(engine: Engine, expected: Sequence[Sequence[Found]]) -> None:
    """A request that stops at a text, beside one that does not. expected: of `MIX`."""
    texts = [output.outputs[0].text for output in engine.generate([MIX[0].prompt], params(max_tokens=24))]
    stop = texts[0][len(texts[0]) // 2 :][:4]
    first, other = engine.generate([MIX[0].prompt, MIX[2].prompt], [params(stop=[stop]), params()])
    assert first.outputs[0].finish_reason == "stop"
    assert texts[0].startswith(first.outputs[0].text)
    assert stop not in first.outputs[0].text
    assert list(first.outputs[0].token_ids) == expected[0][0].tokens[: len(first.outputs[0].token_ids)]
    assert list(other.outputs[0].token_ids) == expected[2][0].tokens
    engine.greedy([[1, 2, 3]], 2)
    engine.check_idle()


def any_traffic(seed: int, count: int) -> list[Arrival]:
    """Requests of every kind that goes beside drafts, at any time; some are aborted."""
    rng = random.Random(seed)
    kinds = [one.params for one in MIX if not one.params.min_p and not one.params.logit_bias]
    arrivals = []
    for prompt in prompts(seed, count):
        asked = rng.choice(kinds)
        aborted = rng.randrange(1, 9) if asked.n == 1 and rng.random() < 0.3 else None
        arrivals.append(Arrival(rng.randrange(3 * count), prompt, asked, aborted))
    return arrivals
