"""A model from outside reads an input of each row that the package does not know: tokens of a plain computation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.serving import Answer, Engine, answer_of
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.engine.voiced_llama import ARCHITECTURE, NUM_VOICES, VoicedReference, install, register
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.batch.row_input import ROW_INPUTS

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(40)
# around the block size, and longer than a step
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (1, 16, 17, 33, 60, 130)]
MAX_TOKENS = 16
OPTIONS: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    # blocks of so few requests that others are preempted
    "num_gpu_blocks_override": 20,
    # hashes of blocks know tokens, not voices
    "enable_prefix_caching": False,
}
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder, while the package is there for this process and those that it starts."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    folder = make_model(tmp_path_factory.mktemp("models") / "voiced", make_config("llama"))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [ARCHITECTURE]}))
    with ROW_INPUTS.scope(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        register()
        yield folder


def check(engine: Engine, model: Path, *, salted: bool = False) -> list[Answer]:
    """Every prompt in every voice, all at once, against a model that computes them alone. salted: by voice."""
    asked = [(prompt, voice) for prompt in PROMPTS for voice in range(NUM_VOICES)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, extra_args={"voice": voice})
        for _, voice in asked
    ]
    prompts: list[Any] = [
        {"prompt_token_ids": prompt, **({"cache_salt": f"voice {voice}"} if salted else {})} for prompt, voice in asked
    ]
    answers = [answer_of(output) for output in engine.llm.generate(prompts, params, use_tqdm=False)]
    reference = VoicedReference(model)
    for voice in range(NUM_VOICES):
        reference.voice = voice
        mine = [answer for answer, (_, other) in zip(answers, asked, strict=True) if other == voice]
        reference.assert_greedy(PROMPTS, mine)
    # a number that did not arrive would not be noticed if it made no difference
    assert len({tuple(answer.tokens) for answer in answers[-NUM_VOICES:]}) == NUM_VOICES
    return answers


def test_a_salt_keeps_cached_blocks_of_different_numbers_apart(model: Path) -> None:
    with Engine(model, {}, **{**OPTIONS, "enable_prefix_caching": True, "num_gpu_blocks_override": 400}) as engine:
        check(engine, model, salted=True)
        again = check(engine, model, salted=True)
    assert all(answer.cached_tokens > 0 for answer in again[-NUM_VOICES:])


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_rows_of_requests_have_their_number(model: Path, ucm: dict[str, Any], asynchronous: bool) -> None:
    with Engine(model, ucm, **OPTIONS, async_scheduling=asynchronous) as engine:
        check(engine, model)
        engine.step()
        engine.check_idle()
        assert asynchronous or engine.preemptions > 0


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_rows_of_drafts_have_the_number_of_their_request(
    model: Path, tiny_llama: Path, ucm: dict[str, Any], method: str
) -> None:
    """The draft model is a Llama without voices: it is not given them, and is wrong now and then."""
    draft = NGRAM if method == "ngram" else {"method": method, "model": str(tiny_llama), "num_speculative_tokens": 3}
    with Engine(model, ucm, **OPTIONS, speculative_config=draft) as engine:
        check(engine, model)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_two_stages_have_the_number(model: Path, ucm: dict[str, Any]) -> None:
    """The plugin's own registry finds the input by its entry point, in processes that this one starts."""
    with EngineOfWorkers(model, ucm, **OPTIONS, **STAGES) as engine:
        check(engine, model)
