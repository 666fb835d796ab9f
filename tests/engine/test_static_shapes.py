"""Padded to buckets, a step gives what it gives at its true shape, and nothing is compiled for it after warm-up."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.static_shapes import shapes, static
from tests.engine.texts import SHORT
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.graphs.shapes.bucket import dominates
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.observability.step_record import StepRecord

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(8)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(64)
# around the block size, longer than a step, and with a common beginning of different depth
PROMPTS = [tokens(count) for count in (1, 2, 15, 16, 17, 33, 120)]
PROMPTS += [COMMON + tokens(3), COMMON + tokens(20), COMMON[:32] + tokens(9), COMMON]
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 100,
}
# Everything that a request may ask of the sampler, on the device and on the host.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.6, "logprobs": 5},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "n": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -100.0}},
    {"temperature": 0.0, "prompt_logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 0, "logprobs": 1},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 3))},
    {"temperature": 0.0, "allowed_token_ids": [4, 5, 6, 90]},
    {"temperature": 1.5, "top_k": 1},
]


def steps(path: Path) -> list[StepRecord]:
    return read_phase_log(path)[1]


@pytest.fixture(scope="module")
def true_engine(tiny_llama: Path) -> Iterator[Engine]:
    """At true shapes."""
    with Engine(tiny_llama, {"graphs": {"mode": "off"}}, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(true_engine: Engine) -> list[Answer]:
    return true_engine.greedy(PROMPTS, 20)


@pytest.fixture(scope="module")
def static_engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """All buckets warm."""
    log = tmp_path_factory.mktemp("static") / "phases.jsonl"
    with Engine(tiny_llama, {**static(), "phase_log": str(log)}, **OPTIONS) as engine:
        yield engine
        assert shapes(engine).stages.new_recipes == 0
        engine.check_idle()
    records = steps(log)
    assert {record.bucket.phase for record in records} >= {"c--", "--u", "-su", "c-u", "csu"}
    assert all(dominates(record.padded, record.bucket) for record in records)
    assert any(record.padded != record.bucket for record in records)


def test_mixed_loads(static_engine: Engine, expected: list[Answer]) -> None:
    """Chunks, decodes beside them, prefixes that are shared at once, and prompts that are all in the cache.
    covers: A1 A3 A4 A6 B1"""
    for _ in range(2):
        assert_same(static_engine.greedy(PROMPTS, 20), expected)
    assert not shapes(static_engine).execution.ready.cold


@pytest.mark.parametrize("seed", range(2))
def test_any_arrival_order(static_engine: Engine, expected: list[Answer], seed: int) -> None:
    """covers: A8"""
    rng = random.Random(seed)
    order = rng.sample(range(len(PROMPTS)), len(PROMPTS))
    arrivals = [rng.randrange(30) for _ in order]
    answers = static_engine.staggered([PROMPTS[index] for index in order], arrivals, 20)
    assert_same(answers, [expected[index] for index in order])


def test_nothing_that_lies_in_pads_changes_a_token(static_engine: Engine, expected: list[Answer]) -> None:
    """Before every step the dummy block, the hidden states and the logits of the step before are full of NaN.
    covers: A9 A10 A11 D8"""
    execution = shapes(static_engine).execution
    finished: dict[str, RequestOutput] = {}
    ids = [static_engine.new_id() for _ in PROMPTS]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        static_engine.add(request_id, prompt, greedy_params(20))
    while static_engine.llm.llm_engine.has_unfinished_requests():
        with torch.inference_mode():
            dummy_blocks = [blocks[0] for blocks in static_engine.cached_blocks()]
            for garbage in (execution._hidden, execution._logits, *dummy_blocks):
                garbage.fill_(float("nan"))
        finished.update((output.request_id, output) for output in static_engine.step() if output.finished)
    found = [list(finished[request_id].outputs[0].token_ids) for request_id in ids]
    assert found == [answer.tokens for answer in expected]


def test_every_way_to_sample(static_engine: Engine, true_engine: Engine) -> None:
    """Each request of a mixed batch gets what it gets at true shapes. covers: B5"""
    params = [SamplingParams(**{"max_tokens": 12, **asked}) for asked in ASKED]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    found, wanted = (engine.generate(prompts, params) for engine in (static_engine, true_engine))
    for asked, one, other in zip(ASKED, found, wanted, strict=True):
        assert _results(one) == _results(other), asked
        assert _scores(one) == pytest.approx(_scores(other), abs=1e-3), asked


def _results(output: RequestOutput) -> list[Any]:
    return [(list(sample.token_ids), sample.finish_reason) for sample in output.outputs]


def _scores(output: RequestOutput) -> list[float]:
    """Every logprob, of the prompt and of all samples, with the tokens that they belong to."""
    lists = [output.prompt_logprobs or [], *(sample.logprobs or [] for sample in output.outputs)]
    entries = [entry for scores in lists for entry in scores if entry is not None]
    return [number for entry in entries for token in sorted(entry) for number in (token, entry[token].logprob)]


def test_random_requests_compile_nothing(static_engine: Engine) -> None:
    """Without a seed nobody knows the tokens; cut to one, they are greedy's. covers: B5"""
    options: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.3}, {"logprobs": 2}, {"repetition_penalty": 1.3}]
    params = [SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, **asked) for asked in options]
    outputs = static_engine.generate(PROMPTS[: len(params)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * len(params)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption(tiny_llama: Path, expected: list[Answer], caching: bool) -> None:
    """A cache that is far too small for all. covers: A3 A7 B1"""
    options = {**OPTIONS, "num_gpu_blocks_override": 17, "enable_prefix_caching": caching}
    with Engine(tiny_llama, static("skeleton"), **options) as engine:
        assert_same(engine.greedy(PROMPTS, 20), expected)
        engine.check_idle()
        assert engine.preemptions > 0
        assert shapes(engine).stages.new_recipes == 0


@pytest.mark.parametrize("skeleton", [1, 3])
def test_the_skeleton_alone_serves_everything(tiny_llama: Path, expected: list[Answer], skeleton: int) -> None:
    """covers: B1 B2 B6"""
    with Engine(tiny_llama, static("skeleton", skeleton=skeleton), **OPTIONS) as engine:
        ready = shapes(engine).execution.ready
        cold = ready.cold
        assert ready.progress[0] in (skeleton + 1, skeleton + 2)
        assert_same(engine.greedy(PROMPTS, 20), expected)
        assert cold
        assert ready.cold == cold
        assert shapes(engine).stages.new_recipes == 0


def test_what_is_warmed_in_idle_gaps_changes_no_answer(tiny_llama: Path, expected: list[Answer]) -> None:
    """covers: B6"""
    with Engine(tiny_llama, static("idle"), **OPTIONS) as engine:
        ready = shapes(engine).execution.ready
        assert_same(engine.greedy(PROMPTS, 20), expected)
        end = time.monotonic() + 120
        while ready.cold and time.monotonic() < end:
            assert_same(engine.greedy(PROMPTS[:3], 4), [answer.first(4) for answer in expected[:3]])
            time.sleep(0.3)
        assert not ready.cold
        assert_same(engine.greedy(PROMPTS, 20), expected)
        assert shapes(engine).stages.new_recipes == 0


def test_what_requests_ask_for_outlasts_a_warm_up_between_two_steps(tiny_llama: Path, true_engine: Engine) -> None:
    """Logits graphs are warmed in the gaps of one batch, over the tensors that hold what its requests ask for."""
    asked: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": [4, 5, 6, 90]},
        {"min_tokens": 12, "stop_token_ids": list(range(3, VOCAB))},
        {"logit_bias": {5: 40.0, 9: -100.0}},
        {"presence_penalty": 1.5, "repetition_penalty": 2.0},
        {"temperature": 1.0, "seed": 5, "top_k": 3},
    ]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **options}) for options in asked]
    params[0]._bad_words_token_ids = [[token] for token in range(0, VOCAB, 2)]
    wanted = [_results(output) for output in true_engine.generate(PROMPTS[: len(params)], params)]
    with Engine(tiny_llama, static("idle", skeleton=1, max_graphs=40), **OPTIONS) as engine:
        ready = shapes(engine).execution.ready
        for index, one in enumerate(params):
            engine.add(str(index), PROMPTS[index], one)
        found: dict[str, RequestOutput] = {}
        cold_logits = {key for key in ready.cold if isinstance(key, int)}
        while len(found) < len(params):
            cold, end = len(ready.cold), time.monotonic() + 2
            found.update((output.request_id, output) for output in engine.step() if output.finished)
            while len(ready.cold) > max(0, cold - 4) and time.monotonic() < end:
                time.sleep(0.02)
        assert cold_logits - ready.cold
        assert [_results(found[str(index)]) for index in range(len(params))] == wanted


def test_one_request_at_a_time(tiny_llama: Path, expected: list[Answer]) -> None:
    """covers: A17"""
    with Engine(tiny_llama, static(), **{**OPTIONS, "max_num_seqs": 1, "num_gpu_blocks_override": 40}) as engine:
        assert_same(engine.greedy(PROMPTS[4:9], 20), expected[4:9])
        assert shapes(engine).stages.new_recipes == 0


def test_contiguous_caches(tiny_llama: Path, expected: list[Answer]) -> None:
    """covers: A19 A20"""
    ucm = {**static(), "attention": {"contiguous_pa": True}}
    with Engine(tiny_llama, ucm, **{**OPTIONS, "num_gpu_blocks_override": 60}) as engine:
        for count in (20, 4):
            assert_same(engine.greedy(PROMPTS, count), [answer.first(count) for answer in expected])
        assert shapes(engine).stages.new_recipes == 0


def test_steps_with_too_many_shared_blocks_run_in_parts(tiny_llama: Path, tmp_path: Path) -> None:
    """Prompts that all find contexts of their own in the cache, beside decodes, and twins that find blocks which the
    other one fills in the same step. covers: A3 B3"""
    options = {**OPTIONS, "max_model_len": 128, "enable_prefix_caching": True}
    prompts = [tokens(count) for count in (100, 101, 90, 85, 103)]
    twins = [twin for prompt in prompts for twin in [prompt + tokens(20)] * 2]
    longer = [*(prompt + tokens(5) for prompt in prompts), *twins]
    logs, answers = [], []
    for name, ucm in {"true": {}, "static": static(max_shared_blocks=8)}.items():
        log = tmp_path / f"{name}.jsonl"
        with Engine(tiny_llama, {**ucm, "phase_log": str(log)}, **options) as engine:
            engine.greedy(prompts, 2)
            together = engine.greedy(longer, 8)
            arrivals = [0, 0, 1, 1, 1, 3, 3, 3, 4, 4]
            answers.append(together + engine.staggered([*prompts, *longer[:5]], arrivals, 8))
            engine.check_idle()
            if engine.runner.static is not None:
                assert engine.runner.static.stages.new_recipes == 0
        logs.append(steps(log))
    assert_same(answers[1], answers[0])
    true, divided = ([record.bucket.shared_blocks for record in log] for log in logs)
    assert max(true) > 24
    assert max(divided) <= 8
    assert len(divided) >= len(true) + 3
    assert sum(record.tokens for record in logs[0]) == sum(record.tokens for record in logs[1])


def test_structured_outputs(tiny_text_model: Path) -> None:
    """Grammars beside free requests, whose rows the masks must not touch. covers: A18 B5"""
    wanted = [
        StructuredOutputsParams(regex=r"[A-Z]{3}-\\d{4}"),
        StructuredOutputsParams(choice=["positive", "negative"]),
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=entry) for entry in wanted]
    params[1:1] = [SamplingParams(temperature=0.0, max_tokens=9)]
    params += [SamplingParams(temperature=0.0, max_tokens=9, logprobs=2)]
    found = []
    for ucm in ({}, static("skeleton", max_graphs=6, recipe_check="off")):
        options = {**OPTIONS, "max_num_seqs": 4, "skip_tokenizer_init": False}
        with Engine(tiny_text_model, ucm, **options, structured_outputs_config={"backend": "xgrammar"}) as engine:
            outputs = engine.generate(SHORT[:4], params)
            found.append([_results(output) for output in outputs])
            engine.check_idle()
    assert outputs[2].outputs[0].text in ("positive", "negative")
    assert found[1] == found[0]
