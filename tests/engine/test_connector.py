"""Our connector with real stores: a second server finds what the first one has computed, whatever else is on."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, gsa, transfer
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.texts import SHORT, story
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(31)
BLOCK = 16


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(80)
PROMPTS = [tokens(5), tokens(150), COMMON + tokens(33), COMMON + tokens(70), (tokens(9) * 20)[:170]]
OUTPUTS = 24
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64}
STATIC = {"mode": "eager", "max_graphs": 8, "warm_up": "full"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def twice(model: Path, ucm: dict[str, Any], folder: Path, prompts: list[Any], **options: Any) -> list[list[Answer]]:
    """Answers of two servers, one after the other, over one folder."""
    found = []
    for _ in range(2):
        with Engine(model, ucm, kv_transfer_config=transfer(file_store(folder)), **{**OPTIONS, **options}) as engine:
            found.append(engine.greedy(prompts, OUTPUTS))
            for _ in range(3):
                engine.step()
            engine.check_idle()
    return found


ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n-grams": ({}, {"speculative_config": NGRAM}),
    "n-grams static": ({"graphs": STATIC}, {"speculative_config": NGRAM}),
    "all blocks chosen": (gsa(1.0), {}),
}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, OUTPUTS)


@pytest.mark.parametrize("name", ENGINES)
def test_loaded_blocks_are_those_of_a_dense_engine(
    tiny_llama: Path, expected: list[Answer], name: str, tmp_path: Path
) -> None:
    """covers: C20. Drafts that were rejected leave nothing in a stored block."""
    ucm, options = ENGINES[name]
    first, second = twice(tiny_llama, ucm, tmp_path, PROMPTS, **options)
    assert_same(first, expected)
    assert_same(second, expected)
    assert [answer.cached_tokens for answer in second] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


@pytest.mark.parametrize("graphs", [{}, {"graphs": {**STATIC, "recipe_check": "fail"}}], ids=["true shapes", "static"])
def test_loaded_blocks_are_chosen_among(tiny_llama: Path, graphs: dict[str, Any], tmp_path: Path) -> None:
    """covers: C11 D2. Blocks that were loaded get summaries: without them they would all be attended."""
    chosen = []
    for start in range(2):
        log = tmp_path / f"phases-{start}.jsonl"
        ucm = {**gsa(0.4), **graphs, "phase_log": str(log)}
        config = transfer(file_store(tmp_path))
        with Engine(tiny_llama, ucm, kv_transfer_config=config, **OPTIONS) as engine:
            hit = engine.greedy(PROMPTS, OUTPUTS)[1].cached_tokens
            engine.check_idle()
        chosen.append(sum(record.sparse for record in read_phase_log(log)[1]))
    assert hit == 144
    # as often as where the blocks were computed, but for the steps in which they wait for their summaries
    assert chosen[1] > 0.7 * chosen[0] > 0
    if graphs:
        return
    config = transfer(file_store(tmp_path))
    with Engine(tiny_llama, kv_transfer_config=config, **OPTIONS) as engine:
        assert [answer.cached_tokens for answer in engine.alone(PROMPTS[:2], 1)] == [0, 0]


def test_a_draft_models_blocks_are_loaded_with_the_targets(
    tiny_llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    draft = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 3}
    first, second = twice(tiny_llama, {}, tmp_path, PROMPTS, speculative_config=draft)
    assert_same(first, expected)
    assert_same(second, expected)
    assert second[1].cached_tokens == 144


def test_the_second_start_of_a_server_skips_the_prompts(tiny_text_model: Path, tmp_path: Path) -> None:
    """Texts: shared prefixes, whole blocks and not. The phase log shows what was not computed."""
    common = story(20, 1)
    texts = [story(30, 5), f"{common} {SHORT[0]}", f"{common} {SHORT[1]}", SHORT[2], common]
    options: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "max_model_len": 640,
        "block_size": 32,
        "max_num_batched_tokens": 256,
    }
    answers, computed, hits = [], [], []
    for start in range(2):
        log = tmp_path / f"phases-{start}.jsonl"
        config = transfer(file_store(tmp_path))
        with Engine(
            tiny_text_model, {"phase_log": str(log)}, kv_transfer_config=config, enable_prefix_caching=False, **options
        ) as engine:
            answers.append(engine.greedy(texts, 8))
        computed.append(sum(record.tokens for record in read_phase_log(log)[1]))
        hits.append(sum(answer.cached_tokens for answer in answers[-1]))
    assert_same(answers[1], answers[0], near_ties=2)
    # the first server finds what requests before have stored, or what waits to be stored
    assert computed[0] + hits[0] == computed[1] + hits[1]
    assert hits[1] > 700
    assert 4 * computed[1] < computed[0]


def on_card(model: str, blocks: str) -> dict[str, Any]:
    """Two servers on the simulated card over one folder, and the card's counts when warm and in the end."""
    found: dict[str, Any] = {"answers": [], "counts": []}
    graphs = {"mode": "auto", "warm_up": "full", "max_graphs": 3}
    for _ in range(2):
        config = transfer(file_store(Path(blocks)))
        options = {**OPTIONS, "num_gpu_blocks_override": 80}
        with Engine(Path(model), {"graphs": graphs}, kv_transfer_config=config, **options) as engine:
            from habana_frameworks.torch.simulator import card

            warm = card.compilations
            found["answers"].append([dataclasses.asdict(answer) for answer in engine.greedy(PROMPTS, OUTPUTS)])
            found["counts"].append((warm, card.compilations))
    return found


def test_the_simulated_card_loads_and_saves_without_compiling(
    tiny_llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    """covers: B1"""
    found = run_on_card(on_card, tmp_path, model=str(tiny_llama), blocks=str(tmp_path)).result
    first, second = ([Answer(**answer) for answer in answers] for answers in found["answers"])
    assert_same(first, expected)
    assert_same(second, expected)
    assert second[1].cached_tokens == 144
    assert [served - warm for warm, served in found["counts"]] == [0, 0]
