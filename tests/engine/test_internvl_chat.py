"""InternVL in its first form (`InternVLChatModel`): pictures as in Transformers' form, with the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.transformers_utils.processors.internvl import InternVLChatImageProcessor

from tests.engine.picture_models import PictureReference, make_picture_model, picture, prompt, words
from tests.engine.serving import Engine, answer_of, greedy_params
from tests.engine.static_shapes import static

pytestmark = pytest.mark.slow  # starts engines

CONFIGURATION = """
from transformers import PretrainedConfig, Qwen2Config


class VisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"
    has_no_defaults_at_init = True

    def __init__(self, vision_config=None, llm_config=None, **values):
        super().__init__(**values)
        self.vision_config = VisionConfig(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
"""
"""The code that such a checkpoint has of its own."""

RENAMED = (
    (r"^(model\.)?vision_tower\.", "vision_model."),
    (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding"),
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.lambda_(\d)$", r".ls\1"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(model\.)?multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^(model\.)?multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^(model\.)?multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
"""Patterns of Transformers' names, and what stands there in the first form."""


def make_chat_model(folder: Path, newer: Path) -> Path:
    """Writes Transformers' model of the folder `newer` in the first form."""
    folder.mkdir()
    weights = load_file(newer / "model.safetensors")
    for name in [name for name in weights if ".attention.q_proj." in name]:
        joined = [weights.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        weights[name.replace("q_proj", "qkv")] = torch.cat(joined)
    for pattern, renamed in RENAMED:
        weights = {re.sub(pattern, renamed, name): weight for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    config = json.loads((newer / "config.json").read_text())
    vision = config["vision_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
    written: dict[str, Any] = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "llm_config": {**config["text_config"], "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            **{name: vision[name] for name in (*sizes, "norm_type", "layer_norm_eps", "num_channels")},
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
            "initializer_factor": 1.0,
        },
        "downsample_ratio": config["downsample_ratio"],
        "force_image_size": vision["image_size"][0],
        "select_layer": -1,
        "ps_version": "v2",
        "dynamic_image_size": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "use_thumbnail": True,
    }
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "configuration_internvl_chat.py").write_text(CONFIGURATION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (newer / name).read_text().replace("<image>", "<IMG_CONTEXT>").replace("[IMG_BREAK]", "<image>")
        (folder / name).write_text(text.replace("[IMG_START]", "<img>").replace("[IMG_END]", "</img>"))
    return folder


class SamePixels(PictureReference):
    """Transformers' form, with the pixels of the first one, whose resizing rounds in another way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        newer, first = self.processor, InternVLChatImageProcessor(24, 1, 4, True, True)

        def process(images: Any, **options: Any) -> Any:
            inputs = newer(images=images, **options)
            if images is not None:
                inputs["pixel_values"] = first(images, return_tensors="pt")["pixel_values_flat"]
            return inputs

        self.processor = process


@pytest.mark.parametrize("ucm", [{}, static(max_graphs=8)], ids=["true shapes", "buckets"])
def test_pictures_in_tiles(tmp_path: Path, ucm: dict[str, Any]) -> None:
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")
    newer = make_picture_model(tmp_path / "newer", "internvl")
    small, wide, high = picture(1), picture(2, 50, 20), picture(3, 17, 60)
    asked = [
        prompt(words(9, 10, 11)),
        prompt(f"w20 <image> {words(30, 31)}", small),
        prompt(f"<image> w9 w10 <image> w40 <image> {words(*range(50, 70))}", wide, high, small),
    ]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 3}, "max_num_seqs": 4}
    # a chunk ends inside of a picture
    options |= {"max_num_batched_tokens": 32, "trust_remote_code": True}
    with Engine(make_chat_model(tmp_path / "chat", newer), ucm, **options) as engine:
        found = engine.llm.generate(asked, greedy_params(32), use_tqdm=False)
        engine.step()
        engine.check_idle()
    SamePixels(newer).assert_greedy(asked, [answer_of(one) for one in found])
