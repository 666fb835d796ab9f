"""Models that pool, and adapters, for the hub of `hub.py`: each is a small one of the kind that its name stands for.

All-MiniLM-L6-v2, a real encoder, stands for other sentence encoders of its size; the rest has random weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from scripts.embedding_model import FOLDER, fetch
from tests.engine.adapters import ALL_LINEAR, EMBEDDINGS, make_adapter
from tests.engine.pooling_models import write_sentence_pooling

ROOT = Path(__file__).resolve().parents[2]
Writer = Callable[[Path, Path], None]
"""Writes a model into the first folder, given the demo model's folder."""
# of the tokenizer of all-MiniLM-L6-v2
_WORDPIECES: dict[str, Any] = {
    "vocab_size": 30522,
    "pad_token_id": 0,
    "bos_token_id": 101,
    "eos_token_id": 102,
    "cls_token_id": 101,
    "sep_token_id": 102,
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
}
_DECODER: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32768}


def _mini_lm(folder: Path, demo: Path, *, tokens: int = 512) -> None:
    """Copies all-MiniLM-L6-v2. tokens: of the longest prompt."""
    shutil.copytree(fetch(ROOT / FOLDER), folder, dirs_exist_ok=True)
    limits = {"max_seq_length": tokens, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits), encoding="utf-8")


def _encoder(
    folder: Path, demo: Path, *, family: str, kind: str = "AutoModel", pools: str = "", **changes: Any
) -> None:
    """Writes an encoder with the tokenizer of all-MiniLM-L6-v2. pools: as sentence-transformers name it."""
    config = AutoConfig.for_model(family, **{**_SHAPE, **_WORDPIECES, **changes})
    # vLLM reads the entry, which checkpoints have, and configurations of newer Transformers do not
    config.position_embedding_type = "absolute"
    _random_model(config, kind).save_pretrained(folder)
    for file in fetch(ROOT / FOLDER).glob("*token*"):
        shutil.copy(file, folder)
    if pools:
        write_sentence_pooling(folder, pools, size=config.hidden_size)


def _decoder(
    folder: Path, demo: Path, *, family: str, kind: str, pools: str = "", chats: bool = True, **changes: Any
) -> None:
    """Writes a decoder that pools, with the demo model's tokenizer. chats: with its template for chats, too."""
    given = AutoConfig.from_pretrained(demo)
    ids = {name: getattr(given, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    # of one prompt alone Transformers finds the last token by its id, so this is one that texts do not have
    config = AutoConfig.for_model(family, **{**_DECODER, **ids, "pad_token_id": given.vocab_size - 1, **changes})
    _random_model(config, kind).save_pretrained(folder)
    for file in [*demo.glob("tokenizer*"), *(demo.glob("chat_template*") if chats else ())]:
        shutil.copy(file, folder)
    if pools:
        write_sentence_pooling(folder, pools, size=config.hidden_size)


def _random_model(config: Any, kind: str) -> PreTrainedModel:
    """Returns a model whose hidden states are apart. kind: a class of Transformers, such as `AutoModel`."""
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3 if "embed" in name else 1.6 / config.hidden_size**0.5)
    return model.to(torch.float32)


def _late_interaction(folder: Path, demo: Path, *, architecture: str, size: int) -> None:
    """Copies all-MiniLM-L6-v2 with a projection of each token. size: of its result."""
    _mini_lm(folder, demo)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    width = tensors["embeddings.word_embeddings.weight"].shape[1]
    projection = torch.randn(size, width, generator=torch.Generator().manual_seed(0)) * width**-0.5
    named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file({**named, "linear.weight": projection}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _modern_late_interaction(folder: Path, demo: Path, *, size: int) -> None:
    """Writes a ModernBERT with a projection of each token, as sentence-transformers keep it. size: of its result."""
    _encoder(folder, demo, **_MODERN)
    width = _SHAPE["hidden_size"]
    projection = torch.randn(size, width, generator=torch.Generator().manual_seed(0)) * width**-0.5
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": projection}, folder / "1_Dense/model.safetensors")
    shape = {"in_features": width, "out_features": size, "bias": False}
    (folder / "1_Dense/config.json").write_text(json.dumps(shape), encoding="utf-8")
    modules = [{"idx": 0, "path": "1_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


def _adapter(folder: Path, demo: Path, *, base: str, of: Writer, modules: Sequence[str] = ALL_LINEAR) -> None:
    """Writes an adapter of rank 8. base: the name of the model that it is for. of: writes that model."""
    with tempfile.TemporaryDirectory() as temporary:
        of(Path(temporary), demo)
        of_base: dict[str, Any] = {"base_model_name_or_path": base}
        make_adapter(folder, Path(temporary), rank=8, alpha=32.0, modules=modules, **of_base)


_CLASSES = "AutoModelForSequenceClassification"
_TOKEN_CLASSES = "AutoModelForTokenClassification"
_MODERN: dict[str, Any] = {"family": "modernbert", "local_attention": 16}
_BASE: dict[str, Any] = {"family": "bert", "hidden_size": 768, "num_attention_heads": 12, "pools": "cls_token"}
POOLING: Mapping[str, Writer] = {
    "intfloat/multilingual-e5-small": _mini_lm,
    "intfloat/e5-small": _mini_lm,
    "sentence-transformers/all-MiniLM-L6-v2": _mini_lm,
    "sentence-transformers/all-MiniLM-L12-v2": partial(_mini_lm, tokens=128),
    "BAAI/bge-base-en-v1.5": partial(_encoder, **_BASE),
    "Snowflake/snowflake-arctic-embed-m-v1.5": partial(_encoder, **_BASE, matryoshka_dimensions=[256]),
    "sentence-transformers/stsb-roberta-base-v2": partial(_encoder, family="roberta", pools="mean_tokens"),
    "BAAI/bge-reranker-base": partial(_encoder, family="xlm-roberta", kind=_CLASSES, num_labels=1),
    "papluca/xlm-roberta-base-language-detection": partial(
        _encoder, family="xlm-roberta", kind=_CLASSES, num_labels=20
    ),
    "Rami/multi-label-class-classification-on-github-issues": partial(
        _encoder, family="roberta", kind=_CLASSES, num_labels=8, problem_type="multi_label_classification"
    ),
    "boltuix/NeuroBERT-NER": partial(_encoder, family="bert", kind=_TOKEN_CLASSES, num_labels=9),
    "disham993/electrical-ner-ModernBERT-base": partial(_encoder, **_MODERN, kind=_TOKEN_CLASSES, num_labels=11),
    "Davlan/xlm-roberta-base-ner-hrl": partial(_encoder, family="xlm-roberta", kind=_TOKEN_CLASSES, num_labels=9),
    "google-bert/bert-base-uncased": partial(_encoder, family="bert", kind="AutoModelForMaskedLM"),
    "answerdotai/answerai-colbert-small-v1": partial(_late_interaction, architecture="HF_ColBERT", size=96),
    "lightonai/GTE-ModernColBERT-v1": partial(_modern_late_interaction, size=128),
    "jason9693/Qwen2.5-1.5B-apeach": partial(
        _decoder, family="qwen2", kind=_CLASSES, id2label={0: "Default", 1: "Spoiled"}
    ),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": partial(
        _decoder, family="qwen3", kind=_CLASSES, num_labels=1, chats=False
    ),
    "bd2lcco/Qwen3-0.6B-finetuned": partial(_decoder, family="qwen3", kind=_TOKEN_CLASSES, num_labels=9),
    "nie3e/sentiment-polish-gpt2-small": partial(
        _decoder, family="gpt2", kind=_CLASSES, num_labels=3, n_positions=1024
    ),
    "Qwen/Qwen3-Embedding-0.6B": partial(_decoder, family="qwen3", kind="AutoModelForCausalLM", pools="lasttoken"),
    "Qwen/Qwen3-Reranker-0.6B": partial(_decoder, family="qwen3", kind="AutoModelForCausalLM"),
    "intfloat/e5-mistral-7b-instruct": partial(_decoder, family="mistral", kind="AutoModel", pools="lasttoken"),
    "BAAI/bge-multilingual-gemma2": partial(_decoder, family="gemma2", kind="AutoModel", pools="lasttoken"),
    "ssmits/Qwen2-7B-Instruct-embed-base": partial(_decoder, family="qwen2", kind="AutoModel"),
}


def adapters(models: Mapping[str, Writer]) -> Mapping[str, Writer]:
    """Returns the adapters of models of the hub."""
    made = {
        "charent/self_cognition_Alice": ("Qwen/Qwen3-0.6B", ALL_LINEAR),
        "jeeejeee/llama32-3b-text2sql-spider": ("meta-llama/Llama-3.2-1B", (*ALL_LINEAR, *EMBEDDINGS)),
        "peft-internal-testing/opt-125m-dummy-lora": ("facebook/opt-125m", ("q_proj", "v_proj")),
        "typeof/zephyr-7b-beta-lora": ("HuggingFaceH4/zephyr-7b-beta", ALL_LINEAR),
    }
    return {
        name: partial(_adapter, base=base, of=models[base], modules=modules) for name, (base, modules) in made.items()
    }
