"""Families that read pictures, for a script that serves every family: their files, and prompts with pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.picture_models import SPECIAL, VOCAB, make_picture_model, picture, prompt, words
from tests.engine.qwen_vl_models import make_qwen, picture_prompt, qwen_config

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    **{name: partial(make_picture_model, family=name) for name in ("llava", "mistral3", "internvl")},
    "gemma3_mm": partial(make_picture_model, family="gemma3"),
    **{name: lambda folder, name=name: make_qwen(folder, qwen_config(name)) for name in QWEN},
}
"""By the names of docs/models.toml: what writes a model and its processor into a folder."""

OPTIONS: Mapping[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0}}
"""Options of engines that read these prompts."""

_SMALL, _WIDE, _HIGH = picture(1), picture(2, 50, 20), picture(3, 17, 60)
# words before each picture and behind the last one, and the pictures; the second prompt is the longest one
_PROMPTS: tuple[tuple[list[int], list[Any]], ...] = (
    ([1], []),
    ([0, 140, 24], [_WIDE, _SMALL]),
    ([20, 30, 5], [_HIGH, _WIDE]),
    ([4, 120], [_HIGH]),
    ([17], []),
    ([40, 40], [_SMALL]),
)


def pictured_prompts(name: str) -> list[Any]:
    """Returns prompts of text with none, one and two pictures, which vLLM and Transformers' processor read."""
    if name in QWEN:
        found = (picture_prompt(seed, *one) for seed, one in enumerate(_PROMPTS))
        return [prompt(one.text, *one.images) for one in found]
    rng = random.Random(1)
    texts = ([words(*rng.choices(range(len(SPECIAL), VOCAB - 8), k=count)) for count in one] for one, _ in _PROMPTS)
    return [prompt(" <image> ".join(text), *pictures) for text, (_, pictures) in zip(texts, _PROMPTS, strict=True)]
