"""Encoders: embeddings, classes and scores of pairs are Transformers', at true shapes and in buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pooling_models import (
    CLS,
    ENCODERS,
    SEP,
    Reference,
    cosine,
    make_encoder,
    make_prompts,
    text_of,
    write_sentence_pooling,
)
from tests.engine.serving import Engine
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

# of equal lengths, of one token, and longer than ModernBERT's windows
PROMPTS = make_prompts((1, 2, 5, 16, 33, 16, 100, 16, 130, 5))
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 6, "warm_up": "full"}}
EXECUTIONS = pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
OPTIONS: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "skip_tokenizer_init": False,
}
EXACT = 0.99999
REAL_MODEL = Path(__file__).parents[2] / ".cache" / "models" / "all-minilm-l6-v2"


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def check(engine: Engine, folder: Path, pooling: str) -> None:
    reference = Reference(folder)
    found = engine.llm.embed(ids(PROMPTS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert cosine(output.outputs.embedding, reference.embedding(prompt, pooling)) > EXACT, len(prompt)
    engine.step()
    engine.check_idle()


@EXECUTIONS
@pytest.mark.parametrize("family", ENCODERS)
def test_embeddings(tmp_path: Path, family: str, ucm: dict[str, Any]) -> None:
    folder = make_encoder(tmp_path, family)
    with Engine(folder, ucm, **OPTIONS) as engine:
        assert not engine.core.vllm_config.scheduler_config.enable_chunked_prefill
        assert not engine.runner.get_kv_cache_spec()
        check(engine, folder, "cls")
        if ucm:
            static = engine.runner.static
            assert static is not None
            shapes = static.execution.ready.buckets.forward
            assert {shape.phase for shape in shapes} == {"c--"}
            assert 1 < len(shapes) <= BUCKETS["graphs"]["max_graphs"]


@EXECUTIONS
def test_mean_embeddings_as_sentence_transformers_asks_for(tmp_path: Path, ucm: dict[str, Any]) -> None:
    folder = make_encoder(tmp_path, "bert")
    write_sentence_pooling(folder, "mean_tokens")
    with Engine(folder, ucm, **OPTIONS) as engine:
        check(engine, folder, "mean")


@EXECUTIONS
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_classes(tmp_path: Path, family: str, ucm: dict[str, Any]) -> None:
    folder = make_encoder(tmp_path, family, num_labels=3)
    reference = Reference(folder, classifies=True)
    with Engine(folder, ucm, **OPTIONS) as engine:
        found = engine.llm.classify(ids(PROMPTS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert output.outputs.probs == pytest.approx(reference.logits(prompt).softmax(-1).tolist(), abs=1e-4)


@EXECUTIONS
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_scores_of_pairs(tmp_path: Path, family: str, ucm: dict[str, Any]) -> None:
    """A cross-encoder reads both texts at once; BERT tells them apart by token types."""
    folder = make_encoder(tmp_path, family, num_labels=1)
    reference = Reference(folder, classifies=True)
    query, *documents = make_prompts((5, 7, 30, 5))
    with Engine(folder, ucm, **OPTIONS) as engine:
        found = engine.llm.score(text_of(query), [text_of(one) for one in documents], use_tqdm=False)
    scores = []
    for document, output in zip(documents, found, strict=True):
        tokens = [CLS, *query, SEP, *document, SEP]
        types = [0] * (len(query) + 2) + [1] * (len(document) + 1)
        logit = reference.logits(tokens, types)
        scores.append(float(logit))
        assert output.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-4)
        if family == "bert":
            untyped = float(reference.logits(tokens).sigmoid())
            assert output.outputs.score != pytest.approx(untyped, abs=1e-4), "types make a difference"
    assert len(set(scores)) == len(scores)


def test_vectors_of_all_tokens(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    reference = Reference(folder)
    from vllm.config import PoolerConfig

    with Engine(folder, {}, **OPTIONS, pooler_config=PoolerConfig(task="token_embed")) as engine:
        found = engine.llm.encode(ids(PROMPTS), pooling_task="token_embed", use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert output.outputs.data.shape == (len(prompt), 64)
        assert cosine(output.outputs.data, reference.hidden(prompt)) > EXACT


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"enable_chunked_prefill": True}, "prompts in chunks for an encoder"),
        ({"enable_prefix_caching": True}, "prefix caching with an encoder"),
        ({"additional_config": {"ucm": {"kv_cache": {"compaction": True}}}}, "compaction"),
        ({"additional_config": {"ucm": {"ucm_sparse_method": "GSA"}}}, "ucm_sparse_method"),
    ],
)
def test_what_encoders_cannot_do_is_refused_by_name(tmp_path: Path, asked: dict[str, Any], named: str) -> None:
    folder = make_encoder(tmp_path, "bert")
    with pytest.raises((UnsupportedFeatureError, ValueError), match=named):
        Engine(folder, {}, **{**OPTIONS, **asked})


@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason="`make test-models` fetches the model")
@EXECUTIONS
def test_a_real_model_from_text(ucm: dict[str, Any]) -> None:
    """all-MiniLM-L6-v2, with its tokenizer and its way of pooling, against Transformers."""
    from transformers import AutoTokenizer

    texts = [
        "Berlin is the capital of Germany.",
        "What is the capital of Germany?",
        "A cat sits on the mat, and the rain falls on the roof of an old house. " * 12,
        "x",
    ]
    reference, tokenizer = Reference(REAL_MODEL), AutoTokenizer.from_pretrained(REAL_MODEL)
    with Engine(REAL_MODEL, ucm, **{**OPTIONS, "max_model_len": 256, "seed": 0}) as engine:
        found = [torch.tensor(one.outputs.embedding) for one in engine.llm.embed(texts, use_tqdm=False)]
    for text, embedding in zip(texts, found, strict=True):
        assert cosine(embedding, reference.embedding(tokenizer(text)["input_ids"], "mean")) > 0.9999
    assert found[0] @ found[1] > 0.7 > found[0] @ found[2]
