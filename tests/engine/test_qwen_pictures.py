"""Qwen's families that read pictures give the tokens of Transformers, whatever becomes of a prompt with pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from vllm.config import PoolerConfig

from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.pooling_models import cosine
from tests.engine.serving import Answer, Engine, answer_of, greedy_params

pytest.importorskip("torchvision")  # vLLM's classes import it
from tests.engine.qwen_vl_models import (
    BUCKETS,
    MODELS,
    NGRAM,
    WAYS,
    PicturePrompt,
    PictureReference,
    film,
    make_qwen,
    picture,
    picture_prompt,
    qwen_config,
)

pytestmark = pytest.mark.slow  # starts engines

# 24, 40 and 9 tokens; the first two are resized
WIDE, LARGE, SMALL = picture(0, 50, 30), picture(1, 70, 64), picture(2, 24, 24)
PROMPTS = [
    picture_prompt(1, [5, 7], [WIDE]),
    picture_prompt(2, [3, 2, 9, 4], [WIDE, LARGE, SMALL]),
    picture_prompt(3, [20], []),
    picture_prompt(4, [0, 1], [LARGE]),
    picture_prompt(5, [30, 5, 30], [SMALL, WIDE]),
]
# of 4 to 40 tokens, which are the largest size that is padded to
SIZES = [
    *PROMPTS,
    *(
        picture_prompt(seed, [4, 3], [picture(seed, height, width)])
        for seed, (height, width) in enumerate(
            [(16, 16), (16, 80), (32, 40), (40, 32), (48, 48), (40, 64), (64, 40)], 10
        )
    ),
]
# of 12, 24 and 27 tokens, with Qwen3-VL of other sizes; positions in time end before those in width, as Transformers
# counts on from the latter alone
SHORT, LONG, OTHER = film(3, 2, 16, 48), film(4, 4, 16, 48), film(5, 6, 16, 72)
VIDEOS = [
    picture_prompt(6, [5, 7], [LONG]),
    picture_prompt(7, [9, 2, 4], [OTHER, SMALL]),
    PROMPTS[2],
    picture_prompt(8, [6, 3, 8], [SHORT, LONG]),
]
LENGTH = 32
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"video": 0},
    # a chunk ends inside of a picture
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "max_model_len": 192,
}
TIGHT: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 16}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp(request.param), qwen_config(request.param))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen3"), qwen_config("qwen3_vl"))


def generate(engine: Engine, asked: list[PicturePrompt], length: int = LENGTH) -> list[Answer]:
    params = greedy_params(length)
    return [answer_of(found) for found in engine.llm.generate([one.request for one in asked], params, use_tqdm=False)]


@WAYS
def test_chunks_and_preemptions(model: Path, ucm: dict[str, Any], options: dict[str, Any]) -> None:
    """Prompts of one, two and three pictures and of none at once; requests are preempted in the middle of a picture."""
    with Engine(model, ucm, **TIGHT, **options) as engine:
        found = generate(engine, PROMPTS)
        assert engine.preemptions
        engine.step()
        engine.check_idle()
    PictureReference(model).assert_pictures(PROMPTS, found)


def test_the_same_picture_is_found_in_the_cache_and_another_one_is_not(model: Path) -> None:
    """Prompts of the same tokens and another picture of the same size share the blocks before it alone."""
    other = PROMPTS[4]._replace(images=[picture(9, 24, 24), WIDE])
    with Engine(model, **OPTIONS) as engine:
        found = [generate(engine, [prompt])[0] for prompt in (PROMPTS[4], PROMPTS[4], other)]
        encoded = set(engine.runner.decoder.embeddings._rows)
    # 101 tokens; 31 before the first picture
    assert [answer.cached_tokens for answer in found] == [0, 96, 16]
    assert len(encoded) == 3
    PictureReference(model).assert_pictures([PROMPTS[4], PROMPTS[4], other], found)


def test_a_picture_found_in_the_cache_is_encoded_after_a_preemption(qwen3: Path) -> None:
    """vLLM sends only the size of a picture that prefix caching has found, by which its tokens are positioned."""
    pictures, text = PROMPTS[4], PROMPTS[2]
    with Engine(qwen3, **TIGHT) as engine:
        generate(engine, [pictures], 2)
        # the scheduler would believe them encoded
        engine.core.reset_encoder_cache()
        # the text preempts the prompt with pictures, and takes its blocks
        lengths = [greedy_params(160), greedy_params(80)]
        asked = [one.request for one in (text, pictures)]
        found = [answer_of(output) for output in engine.llm.generate(asked, lengths, use_tqdm=False)]
        assert found[1].cached_tokens == 96
        assert engine.preemptions
        encoded = set(engine.runner.decoder.embeddings._rows)
    assert encoded
    PictureReference(qwen3).assert_pictures([text, pictures], found)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets and drafts"])
def test_videos(model: Path, ucm: dict[str, Any]) -> None:
    """Chunks and preemptions in the middle of a video, with pictures and text in the same steps; then a hit."""
    drafts = {"speculative_config": NGRAM} if ucm else {}
    with Engine(model, ucm, **{**TIGHT, "limit_mm_per_prompt": {}}, **drafts) as engine:
        found = generate(engine, VIDEOS)
        assert engine.preemptions
        again = generate(engine, VIDEOS[1:2], 4)
        assert again[0].cached_tokens >= 32
        engine.step()
        engine.check_idle()
    PictureReference(model).assert_pictures([*VIDEOS, VIDEOS[1]], [*found, *again])


@pytest.mark.parametrize(("pooling", "ucm"), [("LAST", {}), ("MEAN", BUCKETS)], ids=["true shapes", "buckets"])
def test_embeddings_of_pictures(model: Path, pooling: str, ucm: dict[str, Any]) -> None:
    """Of the last token, in chunks that end in a picture and found in the cache; and of the mean of whole prompts."""
    last = pooling == "LAST"
    options = {**OPTIONS, "max_num_batched_tokens": 48 if last else 192, "limit_mm_per_prompt": {}}
    asked = [*PROMPTS, VIDEOS[1]]
    with Engine(
        model, ucm, **options, runner="pooling", pooler_config=PoolerConfig(seq_pooling_type=pooling)
    ) as engine:
        found, again = (engine.llm.embed([one.request for one in asked], use_tqdm=False) for _ in range(2))
        engine.step()
        engine.check_idle()
    reference = PictureReference(model)
    for prompt, *outputs in zip(asked, found, again, strict=True):
        hidden = reference.hidden(prompt)
        for output in outputs:
            assert cosine(output.outputs.embedding, hidden[-1] if last else hidden.mean(0)) > 0.99999
    assert (again[4].num_cached_tokens == 96) is last


def serve(model: str) -> dict[str, Any]:
    """Answers of an engine on the simulated card, and what it compiled for pictures after its start."""
    from habana_frameworks.torch.simulator import card

    with Engine(
        Path(model), {"graphs": {"warm_up": "full", "max_graphs": 4}}, **{**OPTIONS, "limit_mm_per_prompt": {}}
    ) as engine:
        before = card.compilations
        found = generate(engine, [*SIZES, *VIDEOS], 8)
        return {
            "answers": [dataclasses.asdict(answer) for answer in found],
            "compiled": card.compilations - before,
            "broken": broken_duties(),
        }


@pytest.mark.parametrize("family", MODELS)
def test_pictures_and_videos_of_any_size_compile_nothing_on_the_simulated_card(tmp_path: Path, family: str) -> None:
    model = make_qwen(tmp_path / family, qwen_config(family))
    found = run_on_card(serve, tmp_path, model=str(model)).result
    PictureReference(model).assert_pictures([*SIZES, *VIDEOS], [Answer(**answer) for answer in found["answers"]])
    assert found["compiled"] == 0
    assert found["broken"] == {}
