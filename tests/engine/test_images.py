"""Pictures in prompts: tokens and logprobs of Hugging Face's models, whatever is in a step with them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, transfer
from tests.engine.contracts import runner_contract
from tests.engine.picture_models import PictureReference, film, make_picture_model, picture, prompt, words
from tests.engine.serving import Answer, Engine, answer_of, greedy_params
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.runner import multimodal_steps
from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_torchvision")]  # starts engines

BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}
WAYS = pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 3}, "max_num_seqs": 4}
NO_VIDEOS: dict[str, Any] = {**OPTIONS, "limit_mm_per_prompt": {"image": 3, "video": 0}}
SMALL, WIDE, HIGH = picture(1), picture(2, 50, 20), picture(3, 17, 60)
ASKED = [
    prompt(words(9, 10, 11)),
    prompt(f"w20 <image> {words(30, 31)}", SMALL),
    prompt(f"<image> w9 w10 <image> w40 <image> {words(*range(50, 70))}", WIDE, HIGH, SMALL),
    prompt(f"<image> {words(20, 30)}", SMALL),
    prompt(words(*range(9, 50))),
]


@pytest.fixture
def _torchvision() -> None:
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")


class Pictured:
    """A model and Hugging Face's answers."""

    def __init__(self, folder: Path, family: str) -> None:
        pytest.importorskip("torchvision")
        self.model = make_picture_model(folder / family, family)
        self.reference = PictureReference(self.model)

    def ask(
        self, engine: Engine, asked: Sequence[dict[str, Any]] = ASKED, max_tokens: int = 32, near_ties: int = 1
    ) -> list[Answer]:
        prompts: list[Any] = list(asked)
        outputs = engine.llm.generate(prompts, greedy_params(max_tokens), use_tqdm=False)
        answers = [answer_of(output) for output in outputs]
        self.reference.assert_greedy(asked, answers, near_ties)
        return answers


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Pictured:
    return Pictured(tmp_path_factory.mktemp("pictures"), "llava")


@WAYS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_pictures_and_text_in_one_batch(llava: Pictured, ucm: dict[str, Any], asynchronous: bool) -> None:
    with Engine(llava.model, ucm, **OPTIONS, async_scheduling=asynchronous) as engine:
        answers = llava.ask(engine)
        assert len({tuple(answer.tokens) for answer in answers}) == len(ASKED)
        engine.step()
        engine.check_idle()


@WAYS
def test_a_prompt_is_cut_in_a_picture(llava: Pictured, ucm: dict[str, Any]) -> None:
    """Steps of 21 tokens end in pictures of 16, of which two are in one step at most."""
    with Engine(llava.model, ucm, **OPTIONS, max_num_batched_tokens=21) as engine:
        llava.ask(engine)


@WAYS
@pytest.mark.parametrize("family", ["pixtral", "mistral3", "internvl"])
def test_pictures_of_any_size(tmp_path: Path, family: str, ucm: dict[str, Any]) -> None:
    """Encoders that keep the sizes of pictures, with placeholders for the ends of rows, which stay tokens; or that cut
    pictures into tiles. The second time, all pictures are found in the cache.
    """
    pictured = Pictured(tmp_path, family)
    with Engine(pictured.model, ucm, **NO_VIDEOS, max_num_batched_tokens=96) as engine:
        pictured.ask(engine)
        again = pictured.ask(engine, max_tokens=4)
        assert again[2].cached_tokens


def test_internvl_videos(tmp_path: Path) -> None:
    """A frame is a tile of 4 tokens between words; chunks end in videos. The second time, one is found in the cache."""
    pictured = Pictured(tmp_path, "internvl")
    asked = [
        {"prompt": f"w20 <video> {words(30, 31)}", "multi_modal_data": {"video": [film(1, 8)]}},
        {"prompt": "<image> w9 <video> w40", "multi_modal_data": {"image": [WIDE], "video": [film(2, 3)]}},
        ASKED[0],
    ]
    with Engine(pictured.model, BUCKETS, **OPTIONS, max_num_batched_tokens=48) as engine:
        pictured.ask(engine, asked)
        again = pictured.ask(engine, asked[:1], max_tokens=4)
        assert again[0].cached_tokens >= 32
        engine.step()
        engine.check_idle()


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Pictured:
    return Pictured(tmp_path_factory.mktemp("pictures"), "gemma3")


@WAYS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_rows_see_both_ways_inside_of_a_picture(gemma3: Pictured, ucm: dict[str, Any], asynchronous: bool) -> None:
    with Engine(gemma3.model, ucm, **OPTIONS, async_scheduling=asynchronous) as engine:
        gemma3.ask(engine)
        engine.step()
        engine.check_idle()


@WAYS
def test_no_chunk_ends_inside_of_a_picture_that_sees_both_ways(gemma3: Pictured, ucm: dict[str, Any]) -> None:
    """Steps of 21 tokens, pictures of 16, and few blocks: requests are preempted, and find a part of their pictures."""
    few = {**OPTIONS, "max_model_len": 160, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 21}
    asked = [prompt(f"w{20 + seed} <image> <image> {words(30, 31)}", picture(seed), picture(9)) for seed in range(8)]
    with Engine(gemma3.model, ucm, **few) as engine:
        assert engine.core.vllm_config.scheduler_config.disable_chunked_mm_input
        gemma3.ask(engine, asked, max_tokens=40)
        assert engine.preemptions > 0
        gemma3.ask(engine, asked, max_tokens=4)


@WAYS
@pytest.mark.parametrize("family", ["gemma4", "gemma4_both_ways"])
def test_gemma_4(tmp_path: Path, family: str, ucm: dict[str, Any]) -> None:
    """Pictures of 49 to 70 tokens and steps of 96, few blocks: without rows that see both ways, chunks end in pictures;
    requests are preempted in both. The second time, pictures are found in the cache.
    """
    pictured = Pictured(tmp_path, family)
    few = {**NO_VIDEOS, "max_model_len": 320, "num_gpu_blocks_override": 22, "max_num_batched_tokens": 96}
    with Engine(pictured.model, ucm, **few) as engine:
        both_ways = family == "gemma4_both_ways"
        assert engine.core.vllm_config.scheduler_config.disable_chunked_mm_input == both_ways
        pictured.ask(engine)
        assert engine.preemptions > 0
        again = pictured.ask(engine, ASKED[2:3], max_tokens=4)
        assert again[0].cached_tokens
        engine.step()
        engine.check_idle()


@WAYS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_preemption(llava: Pictured, ucm: dict[str, Any], asynchronous: bool) -> None:
    """Few blocks and short steps: requests lose their blocks in the middle of a picture, and after it."""
    few = {**OPTIONS, "max_model_len": 160, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 21}
    asked = [prompt(f"w{20 + seed} <image> <image> {words(30, 31)}", picture(seed), picture(9)) for seed in range(8)]
    with Engine(llava.model, ucm, **few, async_scheduling=asynchronous) as engine:
        llava.ask(engine, asked, max_tokens=40)
        assert engine.preemptions > 0
        engine.step()
        engine.check_idle()


@WAYS
def test_blocks_are_found_with_their_pictures_alone(llava: Pictured, ucm: dict[str, Any]) -> None:
    """Equal tokens, other pictures: no block is found. The same picture: all blocks are, and nothing is encoded."""
    text = f"<image> {words(*range(30, 80))}"
    with Engine(llava.model, ucm, **OPTIONS) as engine:
        first = llava.ask(engine, [prompt(text, SMALL)])
        other = llava.ask(engine, [prompt(text, HIGH)])
        again = llava.ask(engine, [prompt(text, SMALL), prompt(text, HIGH)])
    assert [answer.cached_tokens for answer in (*first, *other, *again)] == [0, 0, 64, 64]


def test_the_same_picture_is_encoded_once(llava: Pictured, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(llava.model, {}, **OPTIONS) as engine:
        model: Any = engine.runner.decoder.model
        encoded = []
        own = model.embed_multimodal
        monkeypatch.setattr(
            model, "embed_multimodal", lambda **kw: encoded.append(len(kw["pixel_values"])) or own(**kw)
        )
        llava.ask(engine, [prompt(f"w{number} <image> <image>", SMALL, SMALL) for number in range(20, 26)])
        assert sum(encoded) == 1
        llava.ask(engine, [prompt("w8 <image> w9", SMALL), prompt("w8 <image> w9", HIGH)])
        assert sum(encoded) == 2


def test_embeddings_make_room_for_others(llava: Pictured) -> None:
    """More pictures than the table holds, one request after the other and all at once."""
    with Engine(llava.model, {}, **OPTIONS, max_num_batched_tokens=40) as engine:
        table = engine.runner.decoder.embeddings
        assert table is not None
        assert table.num_rows == 40
        asked = [prompt(f"<image> w{20 + seed} <image> w30", picture(seed), picture(seed + 1)) for seed in range(8)]
        for one in asked:
            llava.ask(engine, [one], max_tokens=4)
        llava.ask(engine, asked[::-1], max_tokens=4)


@WAYS
def test_drafts_are_verified_behind_pictures(llava: Pictured, ucm: dict[str, Any]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with Engine(llava.model, ucm, **OPTIONS, speculative_config=drafts) as engine:
        llava.ask(engine)


def test_a_picture_that_the_encoder_refuses_ends_its_request_alone(
    llava: Pictured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(llava.model, {}, **OPTIONS) as engine:
        model: Any = engine.runner.decoder.model
        own = model.embed_multimodal

        def fails_for_one(**inputs: Any) -> Any:
            if len(inputs["pixel_values"]) > 1 or fails[0]:
                raise ValueError("bad pixels")
            return own(**inputs)

        fails = [True]
        monkeypatch.setattr(model, "embed_multimodal", fails_for_one)
        bad, good = prompt("w8 <image> w9", HIGH), prompt(words(20, 21))
        prompts: list[Any] = [bad, good]
        failed, other = engine.llm.generate(prompts, greedy_params(8), use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        llava.reference.assert_greedy([good], [answer_of(other)])
        fails[0] = False
        llava.ask(engine, [bad, prompt("w8 <image> w9", WIDE)])
        engine.step()
        engine.check_idle()


def test_text_alone(llava: Pictured) -> None:
    with Engine(llava.model, {}, **OPTIONS, language_model_only=True) as engine:
        assert engine.runner.decoder.embeddings is None
        llava.ask(engine, [ASKED[0], ASKED[4]])


def test_embeddings_are_made_again_after_a_reset(llava: Pictured) -> None:
    with Engine(llava.model, {}, **OPTIONS) as engine:
        llava.ask(engine, [ASKED[1]])
        engine.llm.llm_engine.reset_encoder_cache()
        engine.llm.reset_prefix_cache()
        assert engine.runner.decoder.embeddings.num_free == engine.runner.decoder.embeddings.num_rows
        llava.ask(engine, [ASKED[1]])


def test_a_picture_is_sent_again_that_a_prefix_had_covered(llava: Pictured) -> None:
    """vLLM sends no pixels of a picture whose blocks it has found; then the request loses these."""
    asked = prompt(f"<image> {words(*range(30, 60))}", SMALL)
    with Engine(llava.model, {}, **OPTIONS) as engine:
        llava.ask(engine, [asked], max_tokens=4)
        core, request = engine.llm.llm_engine, engine.new_id()
        core.add_request(request, asked, greedy_params(24))
        for _ in range(4):
            assert not any(output.finished for output in engine.step())
        core.reset_prefix_cache(reset_running_requests=True)
        core.reset_encoder_cache()
        finished = [output for _ in range(40) for output in engine.step() if output.finished]
        (answer,) = map(answer_of, finished)
        assert engine.preemptions == 1
        assert answer.cached_tokens > 16
        llava.reference.assert_greedy([asked], [answer])


def test_inputs_that_vllm_takes_back_are_sent_again(llava: Pictured, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of its V2 runner, vLLM 0.33 takes back pixels that are used up, and sends them after a preemption."""
    if "encoder_input_updates" not in {field.name for field in fields(SchedulerOutput)}:
        pytest.skip("vLLM 0.32 has no such messages")
    found: list[Any] = []
    own = multimodal_steps.encoder_input_updates

    def updates(scheduler_output: SchedulerOutput) -> Any:
        found.extend(data for one in own(scheduler_output).values() for data in one.values())
        return own(scheduler_output)

    monkeypatch.setattr(multimodal_steps, "encoder_input_updates", updates)
    few = {**OPTIONS, "max_model_len": 160, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 21}
    asked = [prompt(f"w{20 + seed} <image> <image> {words(30, 31)}", picture(seed), picture(9)) for seed in range(8)]
    with runner_contract("V2"), Engine(llava.model, {}, **few) as engine:
        llava.ask(engine, asked, max_tokens=40)
        assert engine.preemptions > 0
        assert found.count(None) >= 2 * len(asked)


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
@WAYS
def test_sparse_methods_keep_pictures(llava: Pictured, ucm: dict[str, Any], method: str) -> None:
    """A budget of all blocks gives the tokens of a dense engine, prompts of pictures among them."""
    options = {"sparse_steps": "always", "min_tokens": 32, "min_blocks": 2, "sparse_ratio": 1.0}
    options |= {"local_window_sz": 1, "init_window_sz": 1}
    sparse = {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}}
    asked = [*ASKED, prompt(f"<image> <image> {words(*range(60, 130))}", HIGH, SMALL)]
    with Engine(llava.model, {**ucm, **sparse}, **OPTIONS) as engine:
        llava.ask(engine, asked)


def test_stored_blocks_are_found_with_their_pictures_alone(llava: Pictured, tmp_path: Path) -> None:
    """Blocks of another engine: equal tokens, and other pictures or the same ones."""
    text = f"<image> {words(*range(30, 80))}"
    with Engine(llava.model, {}, **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        llava.ask(engine, [prompt(text, SMALL)])
        engine.step()
    with Engine(llava.model, {}, **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        other = llava.ask(engine, [prompt(text, HIGH)])
        same = llava.ask(engine, [prompt(text, SMALL)])
    assert [answer.cached_tokens for answer in (*other, *same)] == [0, 64]


def test_two_workers(llava: Pictured) -> None:
    with EngineOfWorkers(llava.model, {}, **OPTIONS, tensor_parallel_size=2) as engine:
        llava.ask(engine)
        engine.step()
        engine.check_idle()


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("pictures with pipeline stages", {"pipeline_parallel_size": 2}),
        ("adapters (LoRA) of encoders", {"enable_lora": True, "enable_tower_connector_lora": True}),
        ("embeddings of pictures in requests", {"enable_mm_embeds": True}),
        ("videos of which only a part is kept", {"video_pruning_rate": 0.5}),
    ],
)
def test_refused(llava: Pictured, named: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=re.escape(named)):
        Engine(llava.model, {}, **OPTIONS, **options)


def test_videos_of_other_families_are_refused(tmp_path: Path) -> None:
    model = make_picture_model(tmp_path / "gemma4", "gemma4")
    with pytest.raises(UnsupportedFeatureError, match=r"videos in prompts.*--limit-mm-per-prompt"):
        Engine(model, {}, **OPTIONS)


def test_pictures_longer_than_the_window_are_refused(tmp_path: Path) -> None:
    """A picture of 16 tokens, and layers that see 8."""
    model = make_picture_model(tmp_path / "gemma3", "gemma3")
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["sliding_window"] = 8
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match="pictures of 16 tokens each that are longer than the model's"):
        Engine(model, {}, **OPTIONS)
