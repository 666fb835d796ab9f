"""Structured output: what is asked for is what comes, beside free requests in the same batch."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.jobs import Alone, mixed_jobs
from tests.server.server import MODEL_NAME

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
ASK: Any = [{"role": "user", "content": "Describe a thing as JSON."}]
REGEX = r"[0-9]{3}-[a-f]{4}"
CHOICES = ["strongly agree", "agree", "disagree"]
GRAMMAR = 'root ::= "yes " ("sir" | "madam") "!"'
CONSTRAINTS = {"regex": REGEX, "choice": CHOICES, "grammar": GRAMMAR}


def check(kind: str, text: str) -> None:
    if kind == "regex":
        assert re.fullmatch(REGEX, text), text
    elif kind == "choice":
        assert text in CHOICES
    else:
        assert text in {"yes sir!", "yes madam!"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema(client: OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 120}
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=ASK, response_format=RESPONSE_FORMAT, **options
    ).choices[0]
    assert answer.finish_reason == "stop", answer.message.content
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constraint(client: OpenAI, kind: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=ASK,
        temperature=1,
        seed=1,
        max_tokens=30,
        extra_body={"structured_outputs": {kind: CONSTRAINTS[kind]}},
    )
    check(kind, answer.choices[0].message.content or "")


def test_constrained_and_free_requests_in_one_batch(async_client: Callable[[], AsyncOpenAI], alone: Alone) -> None:
    """covers: A18 (a mask binds its own request and no other)"""
    free = [job for job in mixed_jobs() if job.max_tokens > 14][:4]

    async def together() -> tuple[list[Any], list[Any]]:
        async with async_client() as client:
            constrained = [
                client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=ASK,
                    temperature=1,
                    max_tokens=30,
                    extra_body={"structured_outputs": {kind: value}},
                )
                for kind, value in CONSTRAINTS.items()
            ]
            unbound = [client.completions.create(**job.arguments("beside masks")) for job in free]
            return await asyncio.gather(asyncio.gather(*constrained), asyncio.gather(*unbound))

    constrained, unbound = asyncio.run(together())
    for kind, answer in zip(CONSTRAINTS, constrained, strict=True):
        check(kind, answer.choices[0].message.content)
    assert [answer.choices[0].text for answer in unbound] == [alone(job) for job in free]
