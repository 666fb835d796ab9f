"""A cache of the hub of models in which each model that vLLM's tests name is a small one of the same kind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, LlavaConfig, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.conformance.stand_ins import POOLING, Writer, adapters
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm_tools.demo.model import DEFAULT_OUTPUT, fetch_demo_model

COMMIT = "0" * 40
# the demo model's tokenizer has so many tokens; tests ask for ids below 50,000 of the others
TOKENS = 49152
_PICTURE = "<image>"
# of shapes without weights: vLLM would look for it in their weights, and wait 2 s for the hub to answer
_DTYPE = "bfloat16"


def _demo(folder: Path, demo: Path) -> None:
    shutil.copytree(demo, folder, dirs_exist_ok=True)


def _random(folder: Path, demo: Path, *, family: str, **changes: Any) -> None:
    given = AutoConfig.from_pretrained(demo)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    values = {"vocab_size": TOKENS, **{name: getattr(given, name) for name in names}, **changes}
    make_model(folder, make_config(family, **values))
    _tokenizer(folder, demo)


def _shape(folder: Path, demo: Path, *, family: str, **changes: Any) -> None:
    """A configuration without weights, for tests that make a scheduler and no engine."""
    AutoConfig.for_model(family, **{"dtype": _DTYPE, **changes}).save_pretrained(folder)
    _tokenizer(folder, demo)


def _llava(folder: Path, demo: Path) -> None:
    """Writes the configuration and the processor of a model that reads pictures: 576 tokens each, as the real one's."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.add_special_tokens({"additional_special_tokens": [_PICTURE]})
    size = {"height": 336, "width": 336}
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size)
    LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    encoder = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    LlavaConfig(
        text_config=text,
        vision_config=encoder,
        image_token_index=len(tokenizer) - 1,
        image_seq_length=576,
        architectures=["LlavaForConditionalGeneration"],
        dtype=_DTYPE,
    ).save_pretrained(folder)


def _tokenizer(folder: Path, demo: Path) -> None:
    for file in [*demo.glob("tokenizer*"), *demo.glob("chat_template*")]:
        shutil.copy(file, folder)


_OPT = partial(_random, family="opt", vocab_size=50272, max_position_embeddings=2048)
_QWEN3 = partial(_random, family="qwen3", max_position_embeddings=40960)
_QWEN2 = partial(_random, family="qwen2", max_position_embeddings=32768)
_GPT2 = partial(_random, family="gpt2", vocab_size=50257, n_positions=1024)
_LLAMA = partial(_random, family="llama", max_position_embeddings=8192)
_GENERATING: Mapping[str, Writer] = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT,
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen3-1.7B": _QWEN3,
    "Qwen/Qwen2-1.5B-Instruct": _demo,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2,
    "Qwen/Qwen1.5-7B": partial(_shape, family="qwen2", max_position_embeddings=32768),
    "Qwen/Qwen2.5-VL-3B-Instruct": partial(_shape, family="qwen2", max_position_embeddings=32768),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN2,
    "meta-llama/Llama-3.2-1B": _LLAMA,
    "meta-llama/Llama-3.2-1B-Instruct": _demo,
    "hmellor/tiny-random-LlamaForCausalLM": _LLAMA,
    "google/gemma-3-1b-it": partial(_shape, family="gemma3_text", architectures=["Gemma3ForCausalLM"]),
    "gpt2": _GPT2,
    "openai-community/gpt2": _GPT2,
    "HuggingFaceH4/zephyr-7b-beta": _demo,
    "llava-hf/llava-1.5-7b-hf": _llava,
}
MODELS: Mapping[str, Writer] = {**_GENERATING, **POOLING, **adapters(_GENERATING)}
"""Name -> what writes the model that stands for it into a folder, given the demo model's folder."""


def make_hub(hub: Path, root: Path) -> Path:
    """Writes the models that are not there yet into `hub`, a folder for `HF_HUB_CACHE`, and returns it.

    Args:
        hub: the folder.
        root: the folder of this project, in which the demo model is, or is put.
    """
    missing = [name for name in MODELS if not _snapshot(hub, name).is_dir()]
    demo = fetch_demo_model(root / DEFAULT_OUTPUT) if missing else root
    hub.mkdir(parents=True, exist_ok=True)
    for name in missing:
        with tempfile.TemporaryDirectory(dir=hub, prefix=".partial-") as temporary:
            made = Path(temporary) / "model"
            made.mkdir()
            MODELS[name](made, demo)
            snapshot = _snapshot(hub, name)
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            reference = snapshot.parents[1] / "refs/main"
            reference.parent.mkdir(exist_ok=True)
            reference.write_text(COMMIT, encoding="utf-8")
            made.rename(snapshot)
    return hub


def _snapshot(hub: Path, name: str) -> Path:
    """The folder in which the hub's client looks for the files of a model."""
    return hub / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
