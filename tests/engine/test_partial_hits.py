"""`ucm.kv_cache.partial_hits`: requests take parts of blocks as copies; no answer changes, and less is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.engine.connector import file_store, transfer
from tests.engine.hpu_process import run_on_card
from tests.engine.partial_hits import count_scheduled, gsa
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.swap import Poisoned
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.options.errors import UcmConfigError, UnsupportedFeatureError

RNG = random.Random(5)
ON: dict[str, Any] = {"kv_cache": {"partial_hits": True}}
BLOCK = 16
COMMON = [RNG.randrange(3, VOCAB) for _ in range(3 * BLOCK + 11)]


def prompts(count: int, common: int) -> list[list[int]]:
    return [COMMON[:common] + [RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 30))] for _ in range(count)]


ASKED = prompts(8, 2 * BLOCK + 5) + prompts(4, 5)
ARRIVALS = [3 * index for index in range(len(ASKED))]
LENGTH = 40
# chunks of prompts end inside of blocks, and requests are preempted
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 24}
STATIC: dict[str, Any] = {"mode": "eager", "max_graphs": 12}


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": ({}, {}),
    "drafts": ({}, {"speculative_config": NGRAM}),
    "static": ({"graphs": STATIC}, {}),
    "all blocks chosen": (gsa(1.0), {}),
    "all blocks chosen, static": ({**gsa(1.0), "graphs": STATIC}, {}),
    "exact admission": ({"scheduler": {"admission": "exact"}}, {}),
}


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> Iterator[list[Answer]]:
    """With room for all, and nothing cached."""
    with Engine(tiny_llama, max_model_len=256, enable_prefix_caching=False) as engine:
        yield engine.greedy(ASKED, LENGTH)


def check(engine: Engine, answers: list[Answer], wanted: list[Answer]) -> None:
    assert_same(answers, wanted)
    assert engine.core.scheduler.block_policies.totals.copies
    for _ in range(3):
        engine.step()
    engine.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_no_answer_changes(tiny_llama: Path, wanted: list[Answer], name: str) -> None:
    """Free blocks that nobody may copy from are NaN."""
    ucm, options = BESIDE[name]
    with Poisoned(tiny_llama, {**ON, **ucm}, **SMALL, **options) as engine:
        check(engine, engine.staggered(ASKED, ARRIVALS, LENGTH), wanted)
        assert engine.preemptions or name == "exact admission"


@pytest.mark.slow
def test_a_draft_model(tiny_llama: Path, wanted: list[Answer]) -> None:
    """Its keys and values are copied with the blocks."""
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    with Poisoned(tiny_llama, ON, **SMALL, speculative_config=drafts) as engine:
        check(engine, engine.staggered(ASKED, ARRIVALS, LENGTH), wanted)


@pytest.mark.slow
def test_beside_our_connector(tiny_llama: Path, wanted: list[Answer], tmp_path: Path) -> None:
    """The second server loads what the first has stored; nothing that was loaded is copied."""
    for _ in range(2):
        stored = transfer(file_store(tmp_path))
        with Engine(tiny_llama, ON, max_model_len=256, kv_transfer_config=stored) as engine:
            assert_same(engine.staggered(ASKED, ARRIVALS, LENGTH), wanted)
            assert engine.core.scheduler.block_policies.totals.copies
            for _ in range(3):
                engine.step()
            engine.check_idle()


def test_a_common_start_of_any_length_is_computed_once(tiny_llama: Path) -> None:
    asked = prompts(6, len(COMMON))
    with Engine(tiny_llama) as engine:
        expected = engine.alone(asked)
    with Engine(tiny_llama, ON) as engine:
        answers = engine.alone(asked)
        assert_same(answers, expected)
        assert [answer.cached_tokens >= len(COMMON) for answer in answers] == [False, *5 * [True]]
        # the whole of a block but its last token, where vLLM computes the block again
        (again,) = engine.greedy([asked[0][: 3 * BLOCK]], 1)
        assert again.cached_tokens == 3 * BLOCK - 1
        engine.check_idle()


def test_requests_that_begin_together_wait_for_the_first(tiny_llama: Path) -> None:
    """n = 8: the prompt is computed once, but for each one's last token."""
    prompt = COMMON[: 2 * BLOCK + 12]
    params = SamplingParams(n=8, temperature=1.0, seed=4, max_tokens=12)
    scheduled = {}
    for name, ucm in (("blocks", {}), ("tokens", ON)):
        with Engine(tiny_llama, ucm) as engine:
            count = count_scheduled(engine)
            (output,) = engine.generate([prompt], params)
            scheduled[name] = count[0]
            assert len(output.outputs) == 8
            engine.check_idle()
    decodes = 8 * 11
    assert scheduled["blocks"] - decodes == len(prompt) + 7 * 12
    assert scheduled["tokens"] - decodes == len(prompt) + 7


@pytest.mark.slow
def test_beam_search_is_that_of_vllm(tiny_text_model: Path) -> None:
    """The same beams, and hardly a token that is computed twice."""
    found, scheduled = {}, {}
    params = BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)
    for name, ucm in (("blocks", {}), ("tokens", ON)):
        with Engine(tiny_text_model, ucm, skip_tokenizer_init=False, max_logprobs=16) as engine:
            count = count_scheduled(engine)
            (output,) = engine.llm.beam_search([{"prompt_token_ids": COMMON}], params)
            found[name] = [(beam.tokens, pytest.approx(beam.cum_logprob, abs=1e-3)) for beam in output.sequences]
            scheduled[name] = count[0]
            engine.check_idle()
    assert [tokens for tokens, _ in found["tokens"]] == [tokens for tokens, _ in found["blocks"]]
    assert scheduled["tokens"] <= len(COMMON) + 3 * 30
    assert scheduled["blocks"] > 3 * scheduled["tokens"]


def test_salts_separate(tiny_llama: Path) -> None:
    prompt, params = COMMON[: BLOCK - 3], greedy_params(1)
    with Engine(tiny_llama, ON) as engine:
        cached = []
        for salt in ("one", "one", "other"):
            asked: Any = {"prompt_token_ids": prompt, "cache_salt": salt}
            (output,) = engine.llm.generate([asked], params, use_tqdm=False)
            cached.append(output.num_cached_tokens)
    assert cached == [0, len(prompt) - 1, 0]


@pytest.mark.slow
def test_dense_requests_take_nothing_that_sparse_steps_have_written(tiny_llama: Path) -> None:
    """And sparse ones go on from it."""
    dense = greedy_params(8)
    dense.extra_args = {"ucm_sparse": False}
    with Engine(tiny_llama, {**ON, **gsa(0.1)}) as engine:
        (sparse,) = engine.greedy([COMMON], 60)
        prompt = COMMON + sparse.tokens + [7, 9]
        first = answer_of(engine.generate([prompt], dense)[0])
        again = answer_of(engine.generate([prompt], dense)[0])
        (follower,) = engine.greedy([prompt], 8)
    with Engine(tiny_llama) as engine:
        (expected,) = engine.greedy([prompt], 8)
    assert [first.cached_tokens, again.cached_tokens] == [0, len(prompt) - 1]
    assert_same([first, again], [expected, expected])
    # the last token of an answer is never computed
    assert follower.cached_tokens == len(prompt) - 3


def test_a_reset_of_the_prefix_cache_forgets_parts_too(tiny_llama: Path) -> None:
    with Engine(tiny_llama, ON) as engine:
        cached = []
        for _ in range(2):
            cached += [engine.greedy([COMMON], 1)[0].cached_tokens for _ in range(2)]
            assert engine.llm.reset_prefix_cache()
    assert cached == 2 * [0, len(COMMON) - 1]


@pytest.mark.usefixtures("contract")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_aborts(tiny_llama: Path, wanted: list[Answer], seed: int) -> None:
    rng = random.Random(seed)
    with Poisoned(tiny_llama, ON, **SMALL) as engine:
        ended: dict[str, list[int]] = {}
        for index, prompt in enumerate(ASKED):
            engine.add(str(index), prompt, greedy_params(LENGTH))
        gone: set[str] = set()
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
            if rng.random() < 0.1:
                victim = str(rng.randrange(len(ASKED)))
                gone.add(victim)
                engine.llm.llm_engine.abort_request([victim])
        for _ in range(3):
            engine.step()
        engine.check_idle()
    whole = {name: tokens for name, tokens in ended.items() if name not in gone}
    assert whole == {name: wanted[int(name)].tokens for name in whole}
    assert whole


def on_the_card(model: str) -> dict[str, Any]:
    """The same requests, on the simulated card, with graphs."""
    ucm = {**ON, "graphs": {"max_graphs": 3, "warm_up": "full"}}
    # nothing is poisoned: that would be recipes of the test
    with Engine(Path(model), ucm, **SMALL) as engine:
        from habana_frameworks.torch.simulator import card

        warm = card.compilations
        answers = engine.staggered(ASKED[:8], ARRIVALS[:8], LENGTH)
        totals = engine.core.scheduler.block_policies.totals
        return {
            "tokens": [answer.tokens for answer in answers],
            "copies": totals.copies,
            "compiled": card.compilations - warm,
        }


@pytest.mark.slow
def test_on_the_simulated_card(tiny_llama: Path, wanted: list[Answer], tmp_path: Path) -> None:
    """No number of copies is a new recipe."""
    found = run_on_card(on_the_card, tmp_path, model=str(tiny_llama)).result
    assert found["tokens"] == [answer.tokens for answer in wanted[:8]]
    assert found["copies"] > 2
    assert found["compiled"] == 0


def test_refused_by_name(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="partial_hits without a prefix cache"):
        Engine(tiny_llama, ON, enable_prefix_caching=False)
    with pytest.raises(UcmConfigError, match=r"ucm\.kv_cache\.partial_hits: found true, expected false with"):
        resolve_config({"ucm": {"kv_cache": {"partial_hits": True, "granularity": "token"}}})


def test_a_prompt_that_fills_the_cache_begins(tiny_llama: Path) -> None:
    """There is no room for the block to copy from."""
    options: dict[str, Any] = {"max_model_len": 64, "block_size": 16, "num_gpu_blocks_override": 5}
    begin = [(7 * i) % 200 + 3 for i in range(40)]
    with Engine(tiny_llama, {"kv_cache": {"partial_hits": True}}, **options) as engine:
        engine.alone([begin], 4)
        (answer,) = engine.alone([[*begin, *[5] * 20]], 4)
    assert answer.cached_tokens == 32
