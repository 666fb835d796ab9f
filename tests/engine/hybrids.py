"""Tiny random models of the families with a state in some layers, and the traffic of their tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from tests.engine.tiny_models import COMMON, MAX_POSITIONS, VOCAB, make_model

_ATTENTION: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_DELTA: dict[str, Any] = {
    **_ATTENTION,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 128,
}
# model type -> what its configuration needs beyond the common values
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        **_ATTENTION,
        "intermediate_size": 128,
        "block_auto_adjust_ff_dim": False,
        # checkpoints name sizes twice, and vLLM reads these
        "tie_word_embeddings": True,
        "conv_dim": 64,
        "block_dim": 64,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        **_ATTENTION,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "zamba2": {
        **_ATTENTION,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "intermediate_size": 128,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "use_mem_rope": True,
        "adapter_rank": 8,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA,
        # with more, Transformers' gated norm would take all groups together
        "mamba_n_groups": 1,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
    },
    "falcon_h1": {
        **_ATTENTION,
        **_MAMBA,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
        "attention_in_multiplier": 0.9,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.8,
        "key_multiplier": 0.7,
    },
    "qwen3_next": {
        **_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": _DELTA,
    "nemotron_h": {
        **_ATTENTION,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "intermediate_size": 128,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
    },
}


def hybrid_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**COMMON, **HYBRIDS[model_type], **changes})


def longer_hybrid(model_type: str, stages: int) -> PreTrainedConfig:
    """Returns a configuration with so many times the layers, so that each stage has layers of both kinds."""
    values = HYBRIDS[model_type]
    changes = {name: values[name] * stages for name in ("layer_types", "layers_block_type") if name in values}
    if changes and "num_hidden_layers" in values:
        changes["num_hidden_layers"] = values["num_hidden_layers"] * stages
    return hybrid_config(model_type, **changes)


def make_hybrid(folder: Path, model_type: str, **changes: Any) -> Path:
    return make_model(folder / model_type, hybrid_config(model_type, **changes))


def watch_experts(model: nn.Module) -> list[torch.Tensor]:
    """Returns a list that grows with each forward of a router: by how much rows prefer the second expert to the third.

    Two orders of a sum may choose different experts if that is little, and then no later number of the row is alike.
    """
    found: list[torch.Tensor] = []

    def watch(router: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        weight = cast(torch.Tensor, getattr(router, "layer", router).weight)
        ranked = (inputs[0].flatten(0, -2) @ weight.T).sort(descending=True).values
        found.append(ranked[:, 1] - ranked[:, 2])

    for name, module in model.named_modules():
        if name.endswith((".router", ".gate")):
            module.register_forward_hook(watch)
    return found


def hybrid_prompts(longest: int = 150) -> list[list[int]]:
    """Prompts shorter than a convolution, around a tile of 64 rows, and longer than a step.

    With this seed no row of the models is between two experts, see `watch_experts`.
    """
    rng = random.Random(8)
    return [[rng.randrange(3, VOCAB) for _ in range(count)] for count in (1, 2, 16, 63, 64, 65, longest)]
