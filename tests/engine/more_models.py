"""Tiny random models of families that no test but the script for all families serves."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.engine.hybrids import HYBRIDS
from tests.engine.tiny_models import COMMON, FAMILIES, MAX_POSITIONS

_EXPERTS: dict[str, Any] = {**FAMILIES["llama"], "head_dim": 16, "num_experts_per_tok": 2}
WITH_STATES = "qwen3_5_moe_text"
# model type -> what its configuration needs beyond the common values
MORE: dict[str, dict[str, Any]] = {
    # all heads share one key, Granite's code models of 20B and 34B
    "gpt_bigcode": {
        "n_embd": 64,
        "n_inner": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_POSITIONS,
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
    },
    "hunyuan_v1_dense": {**FAMILIES["llama"], "head_dim": 16},
    "hunyuan_v1_moe": {**_EXPERTS, "num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    "minimax_m2": {
        **_EXPERTS,
        "num_local_experts": 4,
        "intermediate_size": 32,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "ernie4_5_moe": {
        **_EXPERTS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    WITH_STATES: {
        **HYBRIDS["qwen3_5_text"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def more_config(model_type: str) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**COMMON, **MORE[model_type]})
