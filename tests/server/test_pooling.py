"""The OpenAI-compatible server of pooling models: embeddings, scores, ranks and classes, bad inputs, many at once."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from tests.engine.pooling_models import CLS, SEP, Reference, cosine, make_encoder, make_prompts, text_of
from tests.server.conftest import CLIENT_OPTIONS
from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow  # starts servers

PROMPTS = make_prompts((3, 20, 60, 7))
LENGTH = ("--max-model-len", "128", "--max-num-batched-tokens", "128", "--max-num-seqs", "8")
EXACT = 0.9999


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("models") / "bert", "bert")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("models") / "ranker", "bert", num_labels=1)


@pytest.fixture(scope="module")
def server(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(encoder, tmp_path_factory.mktemp("server"), *LENGTH)
    try:
        yield server
        server.terminate()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def ranking(ranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(ranker, tmp_path_factory.mktemp("ranking"), *LENGTH)
    try:
        yield server
        server.terminate()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
        yield client


def expected(encoder: Path, prompt: list[int]) -> torch.Tensor:
    return Reference(encoder).embedding([CLS, *prompt, SEP], "cls")


def test_embeddings(client: OpenAI, encoder: Path) -> None:
    found = client.embeddings.create(model=MODEL_NAME, input=[text_of(prompt) for prompt in PROMPTS])
    assert found.usage.prompt_tokens == sum(len(prompt) + 2 for prompt in PROMPTS)
    for prompt, one in zip(PROMPTS, found.data, strict=True):
        assert cosine(one.embedding, expected(encoder, prompt)) > EXACT


def test_embeddings_in_base64(server: Server, encoder: Path) -> None:
    asked = {"model": MODEL_NAME, "input": text_of(PROMPTS[0]), "encoding_format": "base64"}
    answer = HTTP.post(f"{server.url}/v1/embeddings", json=asked).raise_for_status().json()
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), np.float32)
    assert cosine(found.copy(), expected(encoder, PROMPTS[0])) > EXACT


def test_many_at_once(client: OpenAI, encoder: Path) -> None:
    prompts = make_prompts([1 + index % 60 for index in range(48)])

    def ask(prompt: list[int]) -> list[float]:
        return client.embeddings.create(model=MODEL_NAME, input=text_of(prompt)).data[0].embedding

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, prompts))
    for prompt, embedding in zip(prompts, found, strict=True):
        assert cosine(embedding, expected(encoder, prompt)) > EXACT


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"input": [5] * 200}, "128"),
    "no tokens": ({"input": [[]]}, "cannot be empty"),
    "no such token": ({"input": [5, 100_000]}, "out of vocabulary"),
    "dimensions": ({"input": "w5", "dimensions": 7}, "[Dd]imension|matryoshka"),
    "no model": ({"input": "w5", "model": "another"}, "does not exist"),
    "a format": ({"input": "w5", "encoding_format": "words"}, "encoding_format"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_gets_an_error_and_the_next_request_an_answer(client: OpenAI, encoder: Path, name: str) -> None:
    asked, message = BAD[name]
    with pytest.raises(openai.APIStatusError, match=message) as error:
        client.embeddings.create(**{"model": MODEL_NAME, **asked})
    assert error.value.status_code in (400, 404, 422)
    found = client.embeddings.create(model=MODEL_NAME, input=text_of(PROMPTS[0]))
    assert cosine(found.data[0].embedding, expected(encoder, PROMPTS[0])) > EXACT


def test_generation_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=MODEL_NAME, prompt="w5", max_tokens=3)
    assert error.value.status_code in (400, 404)


def test_scores_ranks_and_classes(ranking: Server, ranker: Path) -> None:
    reference = Reference(ranker, classifies=True)
    query, *documents = make_prompts((5, 7, 30, 12))
    logits = []
    for document in documents:
        types = [0] * (len(query) + 2) + [1] * (len(document) + 1)
        logits.append(float(reference.logits([CLS, *query, SEP, *document, SEP], types).sigmoid()))
    texts = [text_of(one) for one in documents]

    asked = {"model": MODEL_NAME, "text_1": text_of(query), "text_2": texts}
    scores = HTTP.post(f"{ranking.url}/score", json=asked).raise_for_status().json()["data"]
    assert [one["score"] for one in scores] == pytest.approx(logits, abs=1e-4)

    asked = {"model": MODEL_NAME, "query": text_of(query), "documents": texts}
    ranks = HTTP.post(f"{ranking.url}/rerank", json=asked).raise_for_status().json()["results"]
    assert [one["index"] for one in ranks] == sorted(range(len(logits)), key=lambda index: -logits[index])

    asked = {"model": MODEL_NAME, "input": text_of(query)}
    classes = HTTP.post(f"{ranking.url}/classify", json=asked).raise_for_status().json()["data"]
    alone = float(reference.logits([CLS, *query, SEP]).sigmoid())
    assert classes[0]["probs"] == pytest.approx([alone], abs=1e-4)


def test_pooling(server: Server, encoder: Path) -> None:
    asked = {"model": MODEL_NAME, "input": text_of(PROMPTS[1]), "task": "embed"}
    found = HTTP.post(f"{server.url}/pooling", json=asked).raise_for_status().json()["data"][0]["data"]
    assert cosine(found, expected(encoder, PROMPTS[1])) > EXACT
