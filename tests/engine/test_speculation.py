"""With drafts, right or wrong, every request gets what it gets without them, in fewer steps where they are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.draft_load import MAX_TOKENS, OPTIONS, PROMPTS, STATIC, Steps, tokens
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.texts import SHORT
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.speculation.oracle_proposer import OracleProposer

pytestmark = pytest.mark.slow  # starts engines

MIB = 1 << 20
NUM_DRAFTS = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# a sparse method whose choice is everything: tokens are those of dense attention
CHOICE = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
ALL_BLOCKS = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": CHOICE}}


# what a sampler does differently from token to token
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.6, "logprobs": 5},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 3},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 3))},
    {"temperature": 0.0, "allowed_token_ids": [4, 5, 6, 90], "logprobs": 2},
    {"temperature": 0.7, "seed": 11, "stop_token_ids": list(range(0, VOCAB, 7))},
    {"temperature": 0.0, "max_tokens": 1},
]


@pytest.fixture(scope="module")
def plain_engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def ngram_engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, **OPTIONS, speculative_config=NGRAM) as engine:
        yield engine
        engine.check_idle()


@pytest.fixture(scope="module")
def static_engine(tiny_llama: Path) -> Iterator[Engine]:
    """Steps with more than 16 shared blocks run in parts."""
    ucm = {"graphs": {**STATIC["graphs"], "max_shared_blocks": 16}}
    with Engine(tiny_llama, ucm, **OPTIONS, speculative_config=NGRAM) as engine:
        yield engine
        assert engine.runner.static is not None
        assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[Answer]:
    return plain_engine.greedy(PROMPTS, MAX_TOKENS)


@pytest.fixture(params=["ngram_engine", "static_engine"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """With n-gram drafts, at true shapes and at static ones."""
    found: Engine = request.getfixturevalue(request.param)
    return found


def test_ngram_drafts_change_no_token(engine: Engine, expected: list[Answer]) -> None:
    """Chunks and decodes beside verification, twice, so that prefixes are cached. covers: A2 A3 A6"""
    for _ in range(2):
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)


@pytest.mark.parametrize("seed", range(2))
def test_any_drafts_change_no_token(
    engine: Engine, expected: list[Answer], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right for a random while, beside chunks, and in steps that run in parts. covers: A2 A6"""
    rng = random.Random(seed)
    taken = _spy_on_divided_logits(engine, monkeypatch)
    texts = {tuple(prompt): answer.tokens for prompt, answer in zip(PROMPTS, expected, strict=True)}
    monkeypatch.setattr(engine.runner.parts.drafts, "proposer", OracleProposer(texts, rng))
    count = Steps(engine)
    arrivals = [rng.randrange(12) for _ in PROMPTS]
    assert_same(engine.staggered(PROMPTS, arrivals, MAX_TOKENS), expected)
    assert count.tokens == MAX_TOKENS * len(PROMPTS)
    assert count.requests < 0.8 * count.tokens
    assert bool(taken) == (engine.runner.static is not None)


def _spy_on_divided_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of drafts whose logits were taken from what the parts of a step left."""
    taken: list[int] = []
    if engine.runner.static is None:
        return taken
    divided = engine.runner.static.divided_logits
    logits_of = divided.logits_of

    def spy(slots: Any, position: int) -> Any:
        taken.append(position)
        return logits_of(slots, position)

    monkeypatch.setattr(divided, "logits_of", spy)
    return taken


def results(output: RequestOutput) -> list[Any]:
    return [(list(sample.token_ids), sample.finish_reason, sample.stop_reason) for sample in output.outputs]


def scores(output: RequestOutput) -> list[float]:
    """Every logprob, of the prompt and of the sample, with the tokens that they belong to."""
    lists = [output.prompt_logprobs or [], output.outputs[0].logprobs or []]
    entries = [entry for found in lists for entry in found if entry is not None]
    return [number for entry in entries for token in sorted(entry) for number in (token, entry[token].logprob)]


def test_every_way_to_sample(engine: Engine, plain_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, penalties, min_tokens, stops in the middle of drafts and logprobs of several tokens. covers: A6"""
    params = [SamplingParams(**{"max_tokens": 12, **asked}) for asked in ASKED]
    prompts = PROMPTS[: len(params)]
    wanted = plain_engine.generate(prompts, params)
    # beyond a stop the oracle knows no better than anybody
    texts = {
        tuple(prompt): [*output.outputs[0].token_ids, 3, 3, 3, 3]
        for prompt, output in zip(prompts, wanted, strict=True)
    }
    monkeypatch.setattr(engine.runner.parts.drafts, "proposer", OracleProposer(texts, random.Random(1), wrong=0.3))
    for asked, one, other in zip(ASKED, engine.generate(prompts, params), wanted, strict=True):
        assert results(one) == results(other), asked
        assert scores(one) == pytest.approx(scores(other), abs=1e-3), asked


def test_ngrams_of_a_text_that_repeats_save_steps(ngram_engine: Engine, plain_engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, allowed_token_ids=[4], ignore_eos=True)
    count = Steps(ngram_engine)
    (output,) = ngram_engine.generate([[4] * 9], params)
    assert list(output.outputs[0].token_ids) == [4] * 60
    assert count.steps <= 1 + -(-59 // (NUM_DRAFTS + 1)) + 1


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("caching", [True, False])
def test_preemption(tiny_llama: Path, expected: list[Answer], caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is far too small for all. covers: A3 A6 A7"""
    options = {**OPTIONS, "num_gpu_blocks_override": 19, "enable_prefix_caching": caching}
    texts = {tuple(prompt): answer.tokens for prompt, answer in zip(PROMPTS, expected, strict=True)}
    with Engine(tiny_llama, **options, speculative_config=NGRAM) as engine:
        monkeypatch.setattr(engine.runner.parts.drafts, "proposer", OracleProposer(texts, random.Random(2), wrong=0.3))
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        engine.check_idle()
        assert engine.preemptions > 0


# every prompt's first token, then five in each step
ALL_RIGHT = len(PROMPTS) * (1 + -(-(MAX_TOKENS - 1) // (NUM_DRAFTS + 1))) + 2


@pytest.mark.parametrize("max_shared_blocks", [None, 16])
def test_a_draft_model_that_is_the_target_is_always_right(
    tiny_llama: Path, expected: list[Answer], max_shared_blocks: int | None
) -> None:
    """Chunked prompts, cached prefixes and decodes: its K/V are there wherever the target's are. At static shapes no
    recipe is new after warm-up, and its passes run in parts as the target's steps do. covers: A3 B5"""
    draft = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": NUM_DRAFTS}
    ucm = {} if max_shared_blocks is None else {"graphs": {**STATIC["graphs"], "max_shared_blocks": max_shared_blocks}}
    with Engine(tiny_llama, ucm, **OPTIONS, speculative_config=draft) as engine:
        for _ in range(2):
            count = Steps(engine)
            assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
            assert count.requests <= ALL_RIGHT
        if engine.runner.static is not None:
            assert engine.runner.static.stages.new_recipes == 0
            assert any("draft model" in reason for reason in engine.runner.static._reasons)
        engine.check_idle()


@pytest.mark.parametrize("ucm", [{}, {**STATIC, **ALL_BLOCKS}], ids=["true_shapes", "static_sparse"])
def test_another_draft_model(tiny_llama: Path, tmp_path: Path, expected: list[Answer], ucm: dict[str, Any]) -> None:
    """Of other sizes, in a cache that preempts; and dense in the buckets of a target that chooses blocks."""
    config = make_config("llama", num_hidden_layers=1, hidden_size=32, num_key_value_heads=1)
    draft = {
        "method": "draft_model",
        "model": str(make_model(tmp_path / "draft", config, seed=3)),
        "num_speculative_tokens": 2,
        "max_model_len": 100,
    }
    options = {**OPTIONS, "num_gpu_blocks_override": 19}
    with Engine(tiny_llama, ucm, **options, speculative_config=draft) as engine:
        assert set(engine.runner.parts.kv_caches) > {"draft_model.model.layers.0.self_attn.attn"}
        assert_same(engine.greedy(PROMPTS, MAX_TOKENS), expected)
        assert engine.preemptions > 0
        if engine.runner.static is not None:
            assert engine.runner.static.execution.ready.buckets.selected[-1] > 0
            assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()


def on_card(model: str, prompts: list[list[int]], texts: list[list[int]]) -> dict[str, Any]:
    """What engines of a small simulated card answer with drafts that are right for a random while, and with their own
    model for drafts, and their counts."""
    from habana_frameworks.torch.simulator import card

    card.free_bytes = card.total_bytes = 64 * MIB
    card.bytes_per_capture = MIB
    # small, as the card is
    card.workspace_bytes = 1 << 10
    known = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": NUM_DRAFTS}
    return {"ngram": answers_on_card(model, NGRAM, known), "draft_model": answers_on_card(model, draft, known)}


def answers_on_card(model: str, speculation: dict[str, Any], known: dict[tuple[int, ...], list[int]]) -> dict[str, Any]:
    """Of one engine, whose cache is sized by what graphs leave."""
    from habana_frameworks.torch.simulator import card

    options = {**OPTIONS, "dtype": "float32", "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9}
    ucm = {"graphs": {"mode": "capture", "warm_up": "full", "max_graphs": 10, "max_shared_blocks": 16}}
    with Engine(Path(model), ucm, **options, speculative_config=speculation) as engine:
        assert engine.runner.static is not None
        sizes = [record.size for record in engine.runner.static.summary().records if record.size]
        warm = [card.compilations, card.captures, card.bypasses]
        if speculation is NGRAM:
            engine.runner.parts.drafts.proposer = OracleProposer(known, random.Random(5))
        count = Steps(engine)
        answers = [answer.tokens for answer in engine.greedy(list(known), MAX_TOKENS)]
        served = [card.compilations, card.captures, card.bypasses]
        budget = engine.runner._memory_budget
    counts = {"sizes": sizes, "budget": budget, "requests": count.requests, "tokens": count.tokens}
    return {"answers": answers, "warm": warm, "served": served, **counts}


def test_drafts_on_the_simulated_card(tiny_llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    """In HPU graphs, once warm, neither a position of the drafts nor a pass of a draft model compiles anything; that
    model's graphs have their memory. covers: B5 B7"""
    texts = [answer.tokens for answer in expected]
    found = run_on_card(on_card, tmp_path, lazy=True, model=str(tiny_llama), prompts=PROMPTS, texts=texts).result
    for one in found.values():
        assert one["answers"] == texts
        assert one["served"] == one["warm"]
    assert found["ngram"]["requests"] < 0.8 * found["ngram"]["tokens"]
    assert found["draft_model"]["requests"] <= ALL_RIGHT
    # two captures for each bucket; the budget is what the largest three buckets take, twice
    assert len(found["draft_model"]["sizes"]) > 2
    assert min(found["draft_model"]["sizes"]) > 1.9 * MIB
    assert found["draft_model"]["budget"] > 1.9 * 2 * 3 * MIB


def test_structured_outputs(tiny_text_model: Path) -> None:
    """A draft model that knows nothing of the grammar, beside free requests. covers: A18"""
    wanted = [
        StructuredOutputsParams(regex=r"[A-Z]{3}-\d{4}"),
        StructuredOutputsParams(choice=["positive", "negative"]),
        StructuredOutputsParams(regex=r"(ab){12}"),
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=entry) for entry in wanted]
    params[1:1] = [SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)]
    params += [SamplingParams(temperature=1.0, seed=4, max_tokens=30, structured_outputs=wanted[0])]
    options = {**OPTIONS, "skip_tokenizer_init": False, "structured_outputs_config": {"backend": "xgrammar"}}
    draft = {"method": "draft_model", "model": str(tiny_text_model), "num_speculative_tokens": 3}
    padded = {"graphs": {**STATIC["graphs"], "max_graphs": 5, "recipe_check": "off"}}
    found, counts = [], []
    for ucm, speculation in (({}, None), ({}, NGRAM), ({}, draft), (padded, NGRAM)):
        with Engine(tiny_text_model, ucm, **options, speculative_config=speculation) as engine:
            count = Steps(engine)
            found.append([results(output) for output in engine.generate(SHORT[:5], params)])
            counts.append(count)
            engine.check_idle()
    assert found[1:] == [found[0]] * 3
    assert counts[1].requests < counts[0].requests
    assert counts[2].requests < counts[0].requests


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static shapes"])
@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
def test_logprobs_with_prompts_in_mid_chunk(tiny_llama: Path, plain_engine: Engine, ahead: bool, static: bool) -> None:
    """Drafts are accepted while several prompts that ask for logprobs, of the prompt too, are in their chunks."""
    ucm = {"scheduler": {"async_scheduling": ahead}, **(STATIC if static else {})}
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    options = {**OPTIONS, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 8}
    asked = [{"logprobs": 1}, {"logprobs": 1}, {"logprobs": 2, "prompt_logprobs": 1}, {"logprob_token_ids": [3, 9, 4]}]
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **one) for one in asked]
    prompts = [tokens(count) for count in (20, 120, 100, 90)]
    expected = [plain_engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with Engine(tiny_llama, ucm, **options, speculative_config=drafts) as engine:
        found: dict[str, RequestOutput] = {}
        engine.add("0", prompts[0], params[0])
        for _ in range(5):
            engine.step()
        for index in range(1, len(prompts)):
            engine.add(str(index), prompts[index], params[index])
        while len(found) < len(prompts):
            found.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.check_idle()
    for index, wanted in enumerate(expected):
        one, other = found[str(index)].outputs[0], wanted.outputs[0]
        assert list(one.token_ids) == list(other.token_ids), index
        assert _scores(one.logprobs) == pytest.approx(_scores(other.logprobs), abs=1e-3), index
        assert _scores(found[str(index)].prompt_logprobs) == pytest.approx(_scores(wanted.prompt_logprobs), abs=1e-3)


def _scores(lists: Any) -> list[float]:
    """Every logprob, with the token that it belongs to."""
    entries = [entry for entry in lists or () if entry is not None]
    return [number for entry in entries for token in sorted(entry) for number in (token, entry[token].logprob)]
