"""Tiny models in which later layers read the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.engine.tiny_models import COMMON, FAMILIES, VOCAB
from tests.engine.window_models import WINDOW

_WINDOWS = ["sliding_attention"] * 4
_SIZES: dict[str, Any] = {
    **FAMILIES["llama"],
    "head_dim": 16,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 10,
    "layer_types": [*_WINDOWS, "full_attention"] * 2,
    # weights so large that every token of a context counts
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    # the last five layers have no keys of their own; the first three keep half of their gates
    "gemma3n_text": {
        **_SIZES,
        "intermediate_size": [128] * 10,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.5] * 3 + [0.0] * 7,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_SIZES,
        "num_kv_shared_layers": 5,
        "per_layer_config": {"04": {"head_dim": 32}, "09": {"head_dim": 32}},
    },
}


def write_model(folder: Path, config: PreTrainedConfig) -> Path:
    """Writes a model with the random weights of its class."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def smaller_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Returns a configuration of four layers, of which the last two have no keys of their own unless `changes` give
    them some.
    """
    values = {
        **COMMON,
        **MODELS[model_type],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
    if model_type == "gemma3n_text":
        values |= {"intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}
    else:
        # experts of a 26B model, keys that are shared as in a small one
        experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        values |= {**experts, "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}}}
    return AutoConfig.for_model(model_type, **{**values, **changes})


def divide_gates(model: nn.Module, ranks: int) -> None:
    """Makes Transformers' Gemma 3n keep the largest gates of each rank's part, as vLLM's does with several ranks."""
    for layer in model.modules():
        if hasattr(layer, "_gaussian_topk"):
            layer._gaussian_topk = partial(_in_parts, layer._gaussian_topk, ranks)


def _in_parts(keep_largest: Callable[[Tensor], Tensor], ranks: int, gates: Tensor) -> Tensor:
    return torch.cat([keep_largest(part) for part in gates.chunk(ranks, -1)], -1)
