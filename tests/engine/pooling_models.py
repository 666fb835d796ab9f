"""Tiny random models that pool, with a tokenizer of words, and what Hugging Face Transformers computes with them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 256
PAD, CLS, SEP, UNKNOWN = range(4)
RNG = random.Random(41)

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
# RoBERTa's positions begin after the padding id
_ROBERTA = {**_ENCODER, "max_position_embeddings": 512 + PAD + 1, "type_vocab_size": 2}
# vLLM reads the entry, which checkpoints have, and configurations of newer Transformers do not
_ABSOLUTE = {"position_embedding_type": "absolute"}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ROBERTA,
    "xlm-roberta": {**_ROBERTA, **_ABSOLUTE},
    "modernbert": {
        **_ENCODER,
        "num_hidden_layers": 4,
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
        "cls_token_id": CLS,
        "sep_token_id": SEP,
    },
}


def make_encoder(folder: Path, model_type: str, *, num_labels: int | None = None, seed: int = 0) -> Path:
    """Writes an encoder, with a classification head if it has labels, and its tokenizer."""
    more = {} if num_labels is None else {"num_labels": num_labels}
    config = AutoConfig.for_model(model_type, **ENCODERS[model_type], **more)
    return write_model(folder, config, classifies=num_labels is not None, seed=seed)


def write_model(folder: Path, config: PreTrainedConfig, *, classifies: bool, seed: int = 0) -> Path:
    """Writes a model with weights that make attention matter, and a tokenizer."""
    torch.manual_seed(seed)
    kind: Any = AutoModelForSequenceClassification if classifies else AutoModel
    model = kind.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.normal_(std=0.3 if "embed" in name else 0.2)
    model.to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose words are `w4` to `w255`, with a class token in front and a separator behind."""
    words = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[UNK]": UNKNOWN}
    words |= {f"w{number}": number for number in range(4, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def write_sentence_pooling(folder: Path, mode: str, *, normalizes: bool = True, size: int = 64) -> None:
    """Writes the files of sentence-transformers that tell vLLM how to pool. mode: such as `mean_tokens`."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": size, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_prompts(lengths: Sequence[int], rng: random.Random = RNG) -> list[list[int]]:
    """Returns prompts of these lengths, as token ids."""
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def text_of(prompt: Sequence[int]) -> str:
    """Returns the text whose tokens are these, without the tokenizer's own."""
    return " ".join(f"w{token}" for token in prompt)


class Reference:
    """Transformers' computation of each prompt alone, in float32."""

    def __init__(self, folder: Path, *, classifies: bool = False) -> None:
        kind: Any = AutoModelForSequenceClassification if classifies else AutoModel
        # of eager attention the masks are plain additions
        self.model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    @torch.inference_mode()
    def hidden(self, prompt: Sequence[int]) -> torch.Tensor:
        """Returns [tokens, hidden size]."""
        return self.model(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """Returns [labels]. types: the token type of each token."""
        more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
        return self.model(input_ids=torch.tensor([list(prompt)]), **more).logits[0]

    def embedding(self, prompt: Sequence[int], pooling: str) -> torch.Tensor:
        """Returns the normalised embedding [hidden size]. pooling: `last`, `cls` or `mean`."""
        hidden = self.hidden(prompt)
        pooled = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]
        return torch.nn.functional.normalize(pooled, dim=-1)


def cosine(found: Any, expected: torch.Tensor) -> float:
    """Returns the least cosine of rows."""
    one = torch.as_tensor(found, dtype=torch.float32)
    return float(torch.nn.functional.cosine_similarity(one, expected.float(), dim=-1).min())
