"""Tiny models whose layers see differently far back: several KV-cache groups."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.engine.tiny_models import COMMON, FAMILIES

WINDOW = 24
_SIZES: dict[str, Any] = {**FAMILIES["llama"], "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
# soft caps so low that logits of random weights feel them
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    # windows and full attention in turn, capped logits
    "gemma2": {**_SIZES, **_CAPS, "num_hidden_layers": 4},
    # windows, then a layer of full attention of other rotary frequencies; norms of queries and keys
    "gemma3_text": {**_SIZES, "num_hidden_layers": 3, "sliding_window_pattern": 3},
}
# windows and full attention in turn, sinks, and experts with biases
GPT_OSS: dict[str, Any] = {
    **FAMILIES["llama"],
    "head_dim": 16,
    "sliding_window": WINDOW,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
# three layers with chunks and norms of queries and keys, then one with full attention, without positions, and with
# queries that grow by position; experts in every other layer, one for each row, beside a shared one
LLAMA4: dict[str, Any] = {
    **FAMILIES["llama"],
    "head_dim": 16,
    "num_hidden_layers": 4,
    "attention_chunk_size": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "floor_scale": 16,
}
_OTHERS = {"gpt_oss": GPT_OSS, "llama4_text": LLAMA4}


def window_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**COMMON, **{**MODELS, **_OTHERS}[model_type], **changes})
