"""What only a model's layers reveal is refused while the model is built, before any request could be served wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.model_executor.layers.attention import (
    Attention,
    CrossAttention,
    MLAAttention,
)
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.start.served_layers import ServedLayers


def test_attention_in_both_directions(tmp_path: Path) -> None:
    """Nothing but its kind of layer says so. Refused before weights are looked for: there are none. covers: A18"""
    config = AutoConfig.for_model(
        "hrm_text",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_layers_per_stack=1,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )
    config.architectures = ["HrmTextForCausalLM"]
    config.save_pretrained(tmp_path)
    kind = "layers of the kind PrefillPrefixLMAttention"
    with pytest.raises(UnsupportedFeatureError, match=f"{kind} .*the model's layer model") as error:
        Engine(tmp_path)
    assert "choose another model" in str(error.value)


@pytest.mark.parametrize(
    "kind",
    [CrossAttention, MLAAttention, MambaMixer, TransformersMoERunner],
)
def test_layers_of_other_kinds(kind: type[Any]) -> None:
    """Every one of them enters itself there while its model is built. covers: A18"""
    layers = ServedLayers()
    layers["model.layers.0.attn"] = plain = Attention.__new__(Attention)
    assert layers == {"model.layers.0.attn": plain}
    with pytest.raises(UnsupportedFeatureError, match=f"layers of the kind {kind.__name__} .*model.layers.1"):
        layers["model.layers.1"] = kind.__new__(kind)
