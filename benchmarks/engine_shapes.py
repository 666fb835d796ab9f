"""Models whose whole steps are measured: configurations, and the least that a step of them reads and computes."""

from __future__ import annotations

from typing import Any

from benchmarks.tensor_parallel import SHAPES as DENSE
from benchmarks.tensor_parallel import config_of as dense_config
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec

_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
}
MIXTURES: dict[str, dict[str, Any]] = {
    # Qwen3-30B-A3B
    "30b-a3b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
    # DeepSeek-V2-Lite, without YaRN
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "max_position_embeddings": 8192,
    },
    "small-moe": {
        **_QWEN3_MOE,
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 192,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}
# of layers with a state: a fourth of the layers, or a tenth, have attention
HYBRIDS: dict[str, dict[str, Any]] = {
    # Qwen3-Next-80B-A3B with half of its layers, so that one GPU holds it
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 24,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
    },
    # Granite 4.0 H Small
    "granite-4-h": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 40,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "vocab_size": 100352,
        "max_position_embeddings": 8192,
    },
    "small-hybrid": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
    },
}
_CHOOSING = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
}
# of rows that choose tokens (DSA)
CHOOSING: dict[str, dict[str, Any]] = {
    # the first four layers of DeepSeek V3.2, the last of which has experts, without YaRN and in bfloat16
    "v3.2": {
        **_CHOOSING,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "vocab_size": 129280,
    },
    "small-v3.2": {
        **_CHOOSING,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 128,
        "vocab_size": 4096,
    },
}
_OTHERS = {**MIXTURES, **HYBRIDS, **CHOOSING}
SHAPES = (*DENSE, *_OTHERS)


def config_of(shape: str) -> dict[str, Any]:
    """Returns the configuration in the form of the model's config.json."""
    return _OTHERS[shape] if shape in _OTHERS else dense_config(shape)


def limit_ms(
    model: ModelSpec, requests: int, tokens: float, bandwidth: float, products: float, experts: float | None = None
) -> float:
    """Returns the least time of a step: every weight and cached token read once, or every product, whichever takes
    longer. Of a mixture's experts only those that rows take are read. A decode reads and writes its states.

    requests: 0 for a prompt of `tokens` tokens; otherwise decodes, after this many tokens each. experts: experts that
    rows take, averaged over layers; None: as many as with independent choices.
    """
    rows, pairs = (requests, requests * tokens) if requests else (tokens, tokens * (tokens + 1) // 2)
    weights, multiplied = model.weight_bytes / model.dtype_bytes, rows * model.layers * model.layer_weights
    attending, states = model.layers, 0
    if model.states is not None:
        # in place of attention's weights
        attention = model.layer_weights - model.mlp_matrices * model.hidden * model.intermediate
        attending, states = model.states.attending, 2 * requests * model.states.layers * model.states.bytes_each
        more = model.states.layers * model.states.weights - (model.layers - attending) * attention
        weights, multiplied = weights + more, multiplied + rows * more
    if model.experts is not None:
        mixture, size = model.experts, model.mlp_matrices * model.hidden
        read = float(mixture.read(rows)) if experts is None else experts * mixture.inner + mixture.shared
        weights -= mixture.layers * size * (mixture.weights - read)
        router = rows * model.hidden * mixture.count
        multiplied += mixture.layers * (size * (float(mixture.computed(rows)) - rows * model.intermediate) + router)
    kept = model.dtype_bytes * weights + states
    kept += requests * tokens * model.kv_bytes_per_token if requests else 0
    logits = max(1, requests) * model.hidden * model.vocab
    # of new tokens among themselves, or limited by cached tokens
    pair = model.head_dim + model.value_dim if requests else model.new_pair
    computed = 2 * (multiplied + logits + attending * model.heads * pair * pairs)
    return 1e3 * max(kept / bandwidth, computed / products)
