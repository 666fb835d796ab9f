"""Tiny random models of Qwen's families that read pictures, whose rotary positions have three axes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.engine.tiny_models import COMMON, FAMILIES, VOCAB

IMAGE, VIDEO, START, END = range(VOCAB - 4, VOCAB)
"""Tokens that stand for pictures, and before and behind one."""

PATCH = 4
MERGED = 2
"""Pixels of a patch, and patches on each side of what is one token."""

_TEXT = {key: value for key, value in {**COMMON, **FAMILIES["qwen2"]}.items()}
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
