"""Tiny random models of Qwen's families that read pictures, whose rotary positions have three axes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerFast

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer
from tests.engine.static_shapes import static
from tests.engine.tiny_models import COMMON, FAMILIES, VOCAB, make_model

IMAGE, VIDEO, START, END = range(VOCAB - 4, VOCAB)
"""Tokens that stand for pictures, and before and behind one."""

NAMES = [f"t{number:03}" for number in range(IMAGE)]
NAMES += ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
"""The words of the tokenizer. None begins with another one, by which a special word would be cut in two."""

PATCH = 4
MERGED = 2
"""Pixels of a patch, and patches on each side of what is one token."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
BUCKETS = static(max_graphs=8)
WAYS = pytest.mark.parametrize(
    ("ucm", "options"),
    [({}, {}), (BUCKETS, {}), (BUCKETS, {"speculative_config": NGRAM}), ({}, {"async_scheduling": True})],
    ids=["true shapes", "buckets", "buckets and drafts", "asynchronous"],
)
"""Ways to run engines, from the simplest."""

_TEXT = {**COMMON, **FAMILIES["qwen2"]}
_SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": MERGED}


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **more}


MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _rope()},
        "vision_config": {**_VISION, "embed_dim": 64, "hidden_size": 64},
    },
    # windows of four tokens in all layers of the encoder but the last one
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _rope()},
        "vision_config": {
            **_VISION,
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [2],
        },
    },
    # two layers of the encoder are read by the first two layers of the decoder
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            **FAMILIES["qwen3"],
            "num_hidden_layers": 3,
            "rope_parameters": _rope(mrope_interleaved=True),
        },
        "vision_config": {
            **_VISION,
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}


def qwen_config(model_type: str, **text: Any) -> PreTrainedConfig:
    """text: changes of the decoder."""
    sizes = MODELS[model_type]
    return AutoConfig.for_model(model_type, **_SPECIAL, **{**sizes, "text_config": {**sizes["text_config"], **text}})


def make_qwen(folder: Path, config: PreTrainedConfig) -> Path:
    """Writes a model that never answers with a token for pictures, and its processor, which leaves pictures of 4 to 40
    tokens in their size.
    """
    make_model(folder, config, kind=AutoModelForImageTextToText)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][IMAGE:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _processor(config.model_type).save_pretrained(folder)
    return folder


def _processor(model_type: str) -> Any:
    # their modules need torchvision
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    kinds: dict[str, tuple[Any, Any]] = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }
    pad, bos, eos, unknown = NAMES[:4]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(NAMES)}, unk_token=unknown))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=bos, eos_token=eos, pad_token=pad, additional_special_tokens=NAMES[IMAGE:]
    )
    area = (PATCH * MERGED) ** 2
    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGED,
        "size": {"shortest_edge": 4 * area, "longest_edge": 40 * area},
        # vLLM normalises videos as it does pictures
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor, videos = kinds[model_type]
    return processor(Qwen2VLImageProcessor(**sizes), tokenizer, videos(**sizes))


Video = NDArray[np.uint8]
"""[frames, pixels of a column, pixels of a row, colours]"""


class PicturePrompt(NamedTuple):
    """Tokens, with one IMAGE for each picture and one VIDEO for each video."""

    tokens: list[int]
    images: list[Image.Image]
    videos: Sequence[Video] = ()

    @property
    def request(self) -> dict[str, Any]:
        """Returns the prompt in vLLM's form."""
        media: dict[str, Any] = {"image": self.images} if self.images else {}
        if self.videos:
            media["video"] = [(video, {**_frames_of(video), "do_sample_frames": False}) for video in self.videos]
        return {"prompt_token_ids": self.tokens, **({"multi_modal_data": media} if media else {})}

    @property
    def text(self) -> str:
        """Returns the prompt in words of the tokenizer."""
        return " ".join(NAMES[token] for token in self.tokens)


def _frames_of(video: Video) -> dict[str, Any]:
    """Returns what is known of a video: all of its frames are read, two a second."""
    count = len(video)
    frames = list(range(count))
    return {"fps": 2.0, "duration": count / 2, "total_num_frames": count, "frames_indices": frames}


def picture(seed: int, height: int, width: int) -> Image.Image:
    """height, width: pixels."""
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


def film(seed: int, frames: int, height: int, width: int) -> Video:
    """height, width: pixels."""
    return np.random.RandomState(seed).randint(0, 256, (frames, height, width, 3), dtype=np.uint8)


def picture_prompt(seed: int, lengths: Sequence[int], media: Sequence[Image.Image | Video]) -> PicturePrompt:
    """lengths: words before each picture or video and behind the last one."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, IMAGE) for _ in range(length)] for length in lengths]
    tokens = texts[0]
    for item, text in zip(media, texts[1:], strict=True):
        tokens = [*tokens, START, VIDEO if isinstance(item, np.ndarray) else IMAGE, END, *text]
    videos = [item for item in media if isinstance(item, np.ndarray)]
    return PicturePrompt(tokens, [item for item in media if not isinstance(item, np.ndarray)], videos)


class PictureReference(ReferenceModel):
    """Computes prompts with pictures by Transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        super().__init__(folder, kind=AutoModelForImageTextToText)
        self._processor = AutoProcessor.from_pretrained(folder)
        self._pictures: dict[str, torch.Tensor] = {}

    def expanded(self, prompt: PicturePrompt) -> list[int]:
        """The tokens, with as many of each picture as the decoder has; the next forwards have its pictures."""
        self._pictures = {}
        if not prompt.images and not prompt.videos:
            return prompt.tokens
        videos = {"videos": list(prompt.videos), "video_metadata": [_frames_of(video) for video in prompt.videos]}
        found = dict(
            self._processor(
                text=prompt.text,
                return_tensors="pt",
                **({"images": prompt.images} if prompt.images else {}),
                **({**videos, "do_sample_frames": False} if prompt.videos else {}),
            )
        )
        tokens: list[int] = found.pop("input_ids")[0].tolist()
        self._pictures = {name: found[name] for name in found if name.startswith(("pixel", "image", "video", "second"))}
        return tokens

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits = self.model(**self._inputs(tokens), logits_to_keep=keep).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.inference_mode()
    def hidden(self, prompt: PicturePrompt) -> torch.Tensor:
        """Returns the last hidden states, [tokens, hidden size]."""
        return self.model.model(**self._inputs(self.expanded(prompt))).last_hidden_state[0]

    def _inputs(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(tokens)])
        kinds = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()} if self._pictures else {}
        return {"input_ids": ids, **self._pictures, **kinds}

    def assert_pictures(self, prompts: Sequence[PicturePrompt], answers: Sequence[Answer]) -> None:
        """Like `assert_greedy`; each prompt may part at a near tie."""
        for prompt, answer in zip(prompts, answers, strict=True):
            self.assert_greedy([self.expanded(prompt)], [answer])
