"""A tiny model with a tokenizer of bytes, for the tests of `gaudi-ucm sparse-report`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.tiny_models import make_config, make_model


def tiny_model(folder: Path, weights: bool = True) -> Path:
    """Two layers, 512 positions, a token for each byte."""
    config = make_config("llama")
    if weights:
        make_model(folder, config)
    else:
        config.save_pretrained(folder)
    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
