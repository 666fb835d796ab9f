"""The retrieval model: a Llama of two layers that Hugging Face and vLLM load from `benchmarks/retrieval/model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.retrieval.vocabulary import BEGIN, END, VOCABULARY

MODEL = Path(__file__).parent / "model"
MAX_POSITIONS = 16384
# With this large base, half of the dimensions hardly turn over 16K positions: look-ups must not depend on the distance.
# The other half tells the previous token from all others.
ROPE_THETA = 1e10


def new_model() -> Any:
    """An untrained `LlamaForCausalLM`, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path = MODEL) -> Any:
    """The trained model, float32, for evaluation."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
