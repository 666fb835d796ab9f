"""Requests that cannot be served: a clear error for who sent it, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.jobs import Alone, mixed_jobs
from tests.server.server import HTTP, MAX_MODEL_LEN, MODEL_NAME, Server

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> str:
    return json.dumps({"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 3} | fields)


def chat(**fields: Any) -> str:
    return json.dumps({"model": MODEL_NAME, "messages": HELLO, "max_tokens": 3} | fields)


def structured(**constraint: Any) -> str:
    return completion(structured_outputs=constraint)


# id: (path, body, words of the message)
BAD: dict[str, tuple[str, str, str]] = {
    "torn JSON": (COMPLETION, '{"model": "smollm2", "prompt": ', "JSON decode error"),
    "no body": (CHAT, "", "Field required"),
    "a list for a body": (COMPLETION, "[]", "valid dictionary"),
    "max_tokens a word": (COMPLETION, completion(max_tokens="many"), "body.max_tokens"),
    "temperature a word": (CHAT, chat(temperature="hot"), "body.temperature"),
    "temperature negative": (CHAT, chat(temperature=-1), "temperature must be non-negative, got -1"),
    "messages a word": (CHAT, chat(messages="hello"), "body.messages"),
    "no messages": (CHAT, chat(messages=[]), "empty conversation"),
    "prompt a mapping": (COMPLETION, completion(prompt={"a": 1}), "body.prompt"),
    "prompt empty": (COMPLETION, completion(prompt=""), "non-empty"),
    "prompt without tokens": (COMPLETION, completion(prompt=[[]]), "cannot be empty"),
    "token negative": (COMPLETION, completion(prompt=[-1]), "greater than or equal to 0"),
    "token out of vocabulary": (COMPLETION, completion(prompt=[10**6]), "Token id 1000000 is out of vocabulary"),
    "prompt too long": (COMPLETION, completion(prompt=[5] * 3000), f"maximum context length is {MAX_MODEL_LEN} tokens"),
    "chat too long": (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}]), f"{MAX_MODEL_LEN} tokens"),
    "max_tokens huge": (COMPLETION, completion(max_tokens=10**6), f"max_model_len={MAX_MODEL_LEN}"),
    "max_tokens zero": (COMPLETION, completion(max_tokens=0), "max_tokens must be at least 1"),
    "n zero": (COMPLETION, completion(n=0), "n must be at least 1"),
    "n of the same": (COMPLETION, completion(n=3, temperature=0), "n must be 1 when using greedy sampling"),
    "logprobs too many": (COMPLETION, completion(logprobs=5000), "max allowed: 20"),
    "allowed_token_ids out of vocabulary": (COMPLETION, completion(allowed_token_ids=[10**9]), "allowed_token_ids"),
    "logit_bias out of vocabulary": (COMPLETION, completion(logit_bias={"9999999": 1}), "logit_bias"),
    "prompt_embeds": (COMPLETION, completion(prompt_embeds="AAAA"), "--enable-prompt-embeds"),
    "thinking_token_budget": (CHAT, chat(thinking_token_budget=5), "thinking_token_budget"),
    "cache_salt empty": (COMPLETION, completion(cache_salt=""), "cache_salt"),
    "schema of no type": (COMPLETION, structured(json={"type": "nonsense"}), "Invalid type: nonsense"),
    "schema not JSON": (COMPLETION, structured(json="{torn"), "Invalid JSON"),
    "regex torn": (COMPLETION, structured(regex="(["), "regex"),
    "grammar torn": (COMPLETION, structured(grammar="root := :="), "Invalid grammar"),
    "no choice": (COMPLETION, structured(choice=[]), "cannot be an empty list"),
    "two constraints": (COMPLETION, structured(choice=["a"], regex="a"), "only use one kind"),
}


@pytest.fixture(scope="module")
def next_request_works(client: OpenAI) -> Callable[[], None]:
    """Asserts that the server answers as it did before."""

    def ask() -> str:
        answer = client.completions.create(model=MODEL_NAME, prompt="One two three", max_tokens=2, temperature=0)
        return answer.choices[0].text

    before = ask()

    def check() -> None:
        assert ask() == before

    return check


@pytest.mark.parametrize("case", BAD)
def test_bad_request(server: Server, next_request_works: Callable[[], None], case: str) -> None:
    """covers: D5 (user data never raises in the engine)"""
    path, body, words = BAD[case]
    response = HTTP.post(server.url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400
    assert words in error["message"]
    assert "Traceback" not in error["message"]
    next_request_works()


def test_unknown_model(client: OpenAI, next_request_works: Callable[[], None]) -> None:
    with pytest.raises(openai.NotFoundError, match=r"`nope` does not exist.*smollm2"):
        client.completions.create(model="nope", prompt="Hello")
    next_request_works()


def test_unknown_path(server: Server) -> None:
    assert HTTP.get(f"{server.url}/v1/nothing").status_code == 404


def test_bad_structured_output_beside_a_stream(async_client: Callable[[], AsyncOpenAI], alone: Alone) -> None:
    """Errors of one client never reach another's stream."""
    job = max(mixed_jobs(), key=lambda job: job.max_tokens)
    bad = [BAD[case] for case in ("schema of no type", "regex torn", "grammar torn", "torn JSON")]

    async def together() -> tuple[str, list[int]]:
        async with async_client() as client, httpx.AsyncClient(base_url=str(client.base_url), timeout=60) as raw:
            parts, statuses = [], []
            async for chunk in await client.completions.create(**job.arguments("beside errors"), stream=True):
                parts.append(chunk.choices[0].text)
                path, body, _ = bad[len(parts) % len(bad)]
                headers = {"content-type": "application/json"}
                statuses.append((await raw.post(path.removeprefix("/v1"), content=body, headers=headers)).status_code)
            return "".join(parts), statuses

    text, statuses = asyncio.run(together())
    assert text == alone(job)
    assert statuses == [400] * len(statuses)
    assert len(statuses) >= len(bad), "every kind of error happened while the stream ran"
