"""A tiny random model that speaks: it has the demo model's tokenizer, cut to the most frequent tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoConfig

from tests.engine.tiny_models import make_config, make_model

# Logits of all 49,152 tokens take longer than a tiny model.
TOKENS = 4096


def make_text_model(demo: Path, folder: Path, family: str = "llama") -> Path:
    """Writes a model of this family, with tokenizer and chat template."""
    given = AutoConfig.from_pretrained(demo)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    config = make_config(family, vocab_size=TOKENS, **{name: getattr(given, name) for name in names})
    make_model(folder, config)
    for file in [*demo.glob("tokenizer*"), *demo.glob("chat_template*")]:
        shutil.copy(file, folder)
    _cut(folder / "tokenizer.json")
    return folder


def _cut(file: Path) -> None:
    """Byte-pair encoding numbers tokens in the order of its merges, so the first ones need none of those that go."""
    content = json.loads(file.read_text())
    model = content["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < TOKENS}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    file.write_text(json.dumps(content))
