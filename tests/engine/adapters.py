"""Adapters of random matrices (LoRA), in the files that peft writes, and the same models with their products merged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.lora.request import LoRARequest

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDINGS = ("embed_tokens", "lm_head")
# large enough that every adapter changes tokens
STD = 0.3


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    modules: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    kind: Any = AutoModelForCausalLM,
    part: str = "",
    **config: Any,
) -> Path:
    """Writes an adapter of a model for all of its layers of these names. kind: the class of the model. part: a text
    in the names of all layers. config: of peft, over what is written.
    """
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    reference = kind.from_config(AutoConfig.from_pretrained(model))
    for parameter, weight in reference.named_parameters():
        layer = parameter.removesuffix(".weight")
        name = layer.rpartition(".")[2]
        if name not in modules or part not in layer or weight.dim() != 2:
            continue
        outputs, inputs = weight.shape
        down, up = (torch.randn(shape, generator=random) * STD for shape in ((rank, inputs), (outputs, rank)))
        if name == "embed_tokens":
            # of the transposed matrix
            down, up = torch.randn(rank, outputs, generator=random) * STD, torch.randn(inputs, rank, generator=random)
            tensors[f"base_model.model.{layer}.lora_embedding_A"] = down
            tensors[f"base_model.model.{layer}.lora_embedding_B"] = up
            continue
        tensors[f"base_model.model.{layer}.lora_A.weight"] = down
        tensors[f"base_model.model.{layer}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**described, **config}))
    return folder


def merge_adapter(folder: Path, model: Path, adapter: Path, kind: Any = AutoModelForCausalLM) -> Path:
    """Writes the model with W + B A alpha / r in the place of each matrix W that the adapter has. kind: its class."""
    merged = kind.from_pretrained(model)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if not re.search(r"lora_A\.weight$|lora_embedding_A$", name):
                continue
            layer = re.sub(r"\.lora_A\.weight$|\.lora_embedding_A$", "", name.removeprefix("base_model.model."))
            up = tensors[name.replace("_A", "_B")]
            product = up @ down * scale
            weights[f"{layer}.weight"].add_(product.T if "embedding" in name else product)
    merged.save_pretrained(folder)
    return folder


def request_of(adapter: Path, number: int) -> LoRARequest:
    return LoRARequest(adapter.name, number, str(adapter))


def add_matrices(adapter: Path, layer: str, inputs: int, outputs: int, rank: int = 4) -> None:
    """Adds matrices for another layer to an adapter's file."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.ones(rank, inputs)
    tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.ones(outputs, rank)
    save_file(tensors, file)
