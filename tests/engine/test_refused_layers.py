"""What only a model's layers reveal is refused while the model is built, before any request could be served wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB, make_model
from vllm_gaudi_ucm.options.unsupported import UnsupportedFeatureError


def test_alibi(tmp_path: Path) -> None:
    """covers: A18"""
    config = AutoConfig.for_model("bloom", hidden_size=64, n_head=4, n_layer=2, vocab_size=VOCAB, seq_length=512)
    with pytest.raises(UnsupportedFeatureError, match="ALiBi"):
        Engine(make_model(tmp_path, config))


def test_soft_cap(tmp_path: Path) -> None:
    """Gemma 2 with full attention in every layer still caps its attention logits. covers: A18"""
    config = AutoConfig.for_model(
        "gemma2",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        sliding_window=None,
        layer_types=["full_attention", "full_attention"],
    )
    with pytest.raises(UnsupportedFeatureError, match="soft cap"):
        Engine(make_model(tmp_path, config))
