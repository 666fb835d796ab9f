"""A small Llama of random weights, written to a folder, so that nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WEIGHT = 0.2  # large enough to keep logits apart
EMBEDDING = 1.0


def write_model(folder: Path, full: bool) -> Path:
    """full: a model of some size, instead of a tiny one. bf16 weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads, kv_heads = 4, 2
    if full:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
        heads, kv_heads = 8, 2
    config = LlamaConfig(
        vocab_size=32000 if full else 256,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096 if full else 512,
        **sizes,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=EMBEDDING if "embed" in name else WEIGHT * (64 / sizes["hidden_size"]) ** 0.5)
    model.bfloat16().save_pretrained(folder)
    return folder


def vocabulary(folder: Path) -> int:
    """Returns the vocabulary size in a model's config.json; raises ValueError if it is missing."""
    found = json.loads((folder / "config.json").read_text())
    size = found.get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"--model: config.json has vocab_size {size!r}, expected a number")
    return size
