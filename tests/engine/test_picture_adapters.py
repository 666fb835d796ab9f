"""Adapters (LoRA) of prompts with pictures: the tokens of Hugging Face's models with the adapters merged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from vllm.lora.request import LoRARequest

from tests.engine import qwen_vl_models as qwen
from tests.engine.adapters import ALL_LINEAR, make_adapter, merge_adapter, request_of
from tests.engine.lora_family import BUCKETS
from tests.engine.picture_models import PictureReference, make_picture_model, picture, prompt, words
from tests.engine.serving import NEAR_TIE, Answer, Engine, answer_of, greedy_params
from vllm_gaudi_ucm.lora.adapter_check import AdapterError

pytest.importorskip("torchvision")  # vLLM's classes import it

pytestmark = pytest.mark.slow  # starts engines

LENGTH = 16
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "limit_mm_per_prompt": {"video": 0},
    # a chunk ends inside of a picture
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "max_model_len": 192,
}
WIDE, SMALL = qwen.picture(0, 50, 30), qwen.picture(2, 24, 24)
PROMPTS = [
    qwen.picture_prompt(1, [35, 7], [WIDE]),
    qwen.picture_prompt(2, [3, 2, 9], [WIDE, SMALL]),
    qwen.picture_prompt(3, [20], []),
]
WAYS = pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])


class Adapted:
    """A model that reads pictures, and two adapters of its text model.

    folders: of the model, and of the model with each adapter merged.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        kind, part = AutoModelForImageTextToText, ".language_model."
        self.model = model
        adapters = [
            make_adapter(folder / "every", model, seed=1, kind=kind, part=part),
            make_adapter(folder / "few", model, rank=8, modules=ALL_LINEAR[:3], seed=2, kind=kind, part=part),
        ]
        self.requests: list[LoRARequest | None] = [None, *(request_of(one, n) for n, one in enumerate(adapters, 1))]
        self.folders = [model]
        for adapter in adapters:
            merged = merge_adapter(folder / f"merged {adapter.name}", model, adapter, kind)
            for file in model.iterdir():
                if not (merged / file.name).exists():
                    shutil.copy(file, merged)
            self.folders.append(merged)

    def ask(self, engine: Engine, prompts: Sequence[dict[str, Any]], length: int = LENGTH) -> list[list[Answer]]:
        """Returns the answers to all prompts without an adapter and with each, computed at once."""
        asked: list[Any] = [one for _ in self.requests for one in prompts]
        adapters: Any = [adapter for adapter in self.requests for _ in prompts]
        params = [greedy_params(length) for _ in asked]
        found = engine.llm.generate(asked, params, lora_request=adapters, use_tqdm=False)
        answers, count = [answer_of(one) for one in found], len(prompts)
        of_each = [answers[first : first + count] for first in range(0, len(answers), count)]
        # an adapter that made no difference would not be noticed if it were left out
        scores = torch.tensor([own[0].logprobs for own in of_each])
        assert torch.pdist(scores, p=torch.inf).min() > 5 * NEAR_TIE
        return of_each


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    return Adapted(folder, qwen.make_qwen(folder / "qwen", qwen.qwen_config("qwen2_5_vl")))


@WAYS
def test_pictures_with_and_without_adapters_in_one_batch(adapted: Adapted, ucm: dict[str, Any]) -> None:
    """A picture is encoded once for all adapters; its blocks are found with the same adapter alone."""
    prompts = [one.request for one in PROMPTS]
    with Engine(adapted.model, ucm, **OPTIONS) as engine:
        first = adapted.ask(engine, prompts[:1])
        again = adapted.ask(engine, prompts)
        encoded = set(engine.runner.decoder.embeddings._rows)
        engine.step()
        engine.check_idle()
    assert [own[0].cached_tokens for own in first] == [0, 0, 0]
    assert all(own[0].cached_tokens >= 48 for own in again)
    assert len(encoded) == 2
    for folder, own in zip(adapted.folders, again, strict=True):
        qwen.PictureReference(folder).assert_pictures(PROMPTS, own)


def test_adapters_of_an_encoder_are_refused_by_name(adapted: Adapted, tmp_path: Path) -> None:
    """The requests that do not name it go on."""
    kind = AutoModelForImageTextToText
    tower = make_adapter(tmp_path / "tower", adapted.model, modules=["down_proj"], kind=kind, part=".visual.")
    with Engine(adapted.model, {}, **OPTIONS) as engine:
        with pytest.raises(AdapterError, match=r"matrices for visual\.blocks\.0\.mlp\.down_proj.*take adapters"):
            engine.llm.llm_engine.add_lora(request_of(tower, 9))
        (answers, *_) = adapted.ask(engine, [PROMPTS[0].request])
    qwen.PictureReference(adapted.model).assert_pictures(PROMPTS[:1], answers)


def test_adapters_with_rows_that_see_both_ways(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, make_picture_model(tmp_path / "gemma3", "gemma3"))
    asked = [
        prompt(f"w20 <image> {words(30, 31)} <image> w9", picture(1), picture(2, 50, 20)),
        prompt(words(9, 10, 11)),
    ]
    with Engine(adapted.model, BUCKETS, **{**OPTIONS, "limit_mm_per_prompt": {"image": 2}}) as engine:
        answers = adapted.ask(engine, asked)
    for folder, own in zip(adapted.folders, answers, strict=True):
        PictureReference(folder).assert_greedy(asked, own)
