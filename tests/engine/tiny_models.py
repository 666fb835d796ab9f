"""Tiny random models of the decoder families that are served: two layers, with weights that make attention matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV32Config, PreTrainedConfig

VOCAB = 256
MAX_POSITIONS = 512
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_LATENT: dict[str, Any] = {
    **_LLAMA_LIKE,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# of models with latent attention: the second layer has groups of experts, and one that is shared
LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
}
# experts by sigmoids
_LATER: dict[str, Any] = {
    **_LATENT,
    **LATENT_EXPERTS,
    "q_lora_rank": 32,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
# each row chooses tokens by itself; here no context is longer than what a row may choose
_CHOOSES = {"index_topk": MAX_POSITIONS, "index_head_dim": 16, "index_n_heads": 2}
# model type -> what its configuration needs beyond the common values
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "mistral": {**_LLAMA_LIKE, "sliding_window": None},
    "granite": {
        **_LLAMA_LIKE,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.7,
    },
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        # the second layer has a plain MLP
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {**_LLAMA_LIKE, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    # the routing of DeepSeek V3
    "glm4_moe": {
        **_LLAMA_LIKE,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    # without experts: every layer has the dense MLP
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 2, "n_routed_experts": 1},
    "deepseek_v3": _LATER,
    "deepseek_v32": {**_LATER, **_CHOOSES},
    "glm_moe_dsa": {**_LATER, **_CHOOSES, "indexer_rope_interleave": True},
    "gpt2": {"n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS},
}

MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"}
# with latent attention
LATENT = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"}


def make_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    values = {**COMMON, **FAMILIES[model_type], **changes}
    # once vLLM has read such a model, the automatic class is DeepSeek V3's, without an indexer
    return DeepseekV32Config(**values) if model_type == "deepseek_v32" else AutoConfig.for_model(model_type, **values)


def make_model(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kind: Any = AutoModelForCausalLM,
) -> Path:
    """Writes a model whose random weights are so large that logits are apart and every token of a context counts.

    kind: the class of Transformers that makes models of such a configuration.
    """
    torch.manual_seed(seed)
    model = kind.from_config(config)
    # tied weights of full size would let a model repeat its last token for ever
    embedding = 0.3 if config.tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() > 1:
                weight.normal_(std=embedding if "embed" in name or "wte" in name or "wpe" in name else 0.2)
            else:
                weight.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder)
    return folder
