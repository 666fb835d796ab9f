"""What the OpenAI client gets: chat and completion, streamed or whole, and every sampling option it can ask for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.server import HTTP, MAX_MODEL_LEN, MODEL_NAME, Server

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 24}


def complete(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **(GREEDY | options))


def test_health_models_and_metrics(server: Server, client: OpenAI) -> None:
    assert HTTP.get(f"{server.url}/health").status_code == 200
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL_NAME, MAX_MODEL_LEN)  # type: ignore[attr-defined]
    before = server.metric("vllm:generation_tokens_total")
    complete(client, max_tokens=3)
    assert server.metric("vllm:generation_tokens_total") == before + 3
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_known_answer(client: OpenAI) -> None:
    answer = complete(client, max_tokens=2)
    assert answer.choices[0].text == " Paris."
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 2, 7)


def test_streamed_chat_equals_whole(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, **CHAT)
    chunks = list(client.chat.completions.create(**GREEDY, **CHAT, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_streamed_completion_equals_whole(client: OpenAI) -> None:
    """Tokens arrive as they are made, not all at the end; a busy server may send a few in one chunk."""
    whole = complete(client, max_tokens=16)
    chunks = [chunk.choices[0].text for chunk in complete(client, max_tokens=16, stream=True)]
    assert "".join(chunks) == whole.choices[0].text
    assert len(chunks) >= 5


def test_async_client(async_client: Callable[[], AsyncOpenAI], client: OpenAI) -> None:
    async def ask() -> tuple[Any, str]:
        async with async_client() as asynchronous:
            whole = await asynchronous.chat.completions.create(**GREEDY, **CHAT)
            stream = await asynchronous.chat.completions.create(**GREEDY, **CHAT, stream=True)
            return whole, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    expected = client.chat.completions.create(**GREEDY, **CHAT).choices[0].message.content
    assert whole.choices[0].message.content == streamed == expected


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, **CHAT, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        ranked = [top.logprob for top in token.top_logprobs]
        assert len(ranked) == 4
        assert ranked == sorted(ranked, reverse=True)
        assert token.logprob == ranked[0], "greedy decoding takes the most likely token"
        assert 0 < sum(math.exp(value) for value in ranked) <= 1 + 1e-5


def test_prompt_logprobs_equal_those_of_decoding(client: OpenAI) -> None:
    """Scoring an answer as part of a prompt (one chunk) gives the logprobs that decoding it gave (one row a step)."""
    made = complete(client, max_tokens=12, logprobs=1, extra_body={"return_token_ids": True}).choices[0]
    tokens = [*made.prompt_token_ids, *made.token_ids]
    scored = complete(client, tokens, max_tokens=0, logprobs=1, echo=True).choices[0]
    assert scored.text == PROMPT + made.text
    assert scored.logprobs.token_logprobs[0] is None, "nothing predicts the first token"
    assert len(scored.logprobs.token_logprobs) == len(tokens)
    assert scored.logprobs.token_logprobs[-12:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)


def test_three_choices(client: OpenAI) -> None:
    """covers: A6 (each choice continues its own tokens)"""
    sampled, again = (complete(client, max_tokens=10, n=3, temperature=1.0, seed=3) for _ in range(2))
    assert [choice.index for choice in sampled.choices] == [0, 1, 2]
    assert len({choice.text for choice in sampled.choices}) == 3
    assert [choice.text for choice in again.choices] == [choice.text for choice in sampled.choices]
    assert sampled.usage.completion_tokens == 30
    likeliest = complete(client, max_tokens=10, n=3, temperature=1.0, extra_body={"top_k": 1})
    assert [choice.text for choice in likeliest.choices] == [complete(client, max_tokens=10).choices[0].text] * 3


def test_seed_decides_the_answer_alone_and_in_a_batch(async_client: Callable[[], AsyncOpenAI], client: OpenAI) -> None:
    options: dict[str, Any] = GREEDY | {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 12}
    seeds = [11, 12, 13, 11, 12, 13]

    async def together() -> list[str]:
        async with async_client() as asynchronous:
            asked = (asynchronous.completions.create(**options, seed=seed) for seed in seeds)
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    alone = {seed: client.completions.create(**options, seed=seed).choices[0].text for seed in (11, 12, 13)}
    assert asyncio.run(together()) == [alone[seed] for seed in seeds]
    assert len(set(alone.values())) == 3


def test_stop_string(client: OpenAI) -> None:
    """The stop string ends the answer, whole or streamed, and no part of it is sent."""
    free = complete(client, max_tokens=12).choices[0].text
    word = "answer"
    assert word in free
    whole = complete(client, max_tokens=12, stop=[word]).choices[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (free.split(word)[0], "stop", word)
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, max_tokens=12, stop=[word], stream=True))
    assert streamed == whole.text
    included = complete(client, max_tokens=12, stop=[word], extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == whole.text + word


def test_sampling_options_take_effect(client: OpenAI) -> None:
    """covers: A18 (nothing is accepted and ignored)"""
    (paris,) = complete(client, max_tokens=1, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert complete(client, max_tokens=1, logit_bias={str(paris): -100}).choices[0].text != " Paris"
    assert complete(client, max_tokens=1, extra_body={"bad_words": ["Paris"]}).choices[0].text != " Paris"
    forced = complete(client, max_tokens=4, extra_body={"allowed_token_ids": [paris]}).choices[0].text
    assert forced == " Paris" * 4
    greedy = complete(client, max_tokens=16).choices[0].text
    assert complete(client, max_tokens=16, temperature=2.0, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, max_tokens=16, temperature=2.0, top_p=1e-6).choices[0].text == greedy
    repeated = complete(client, "one one one one one one", max_tokens=8).choices[0].text
    penalised = complete(client, "one one one one one one", max_tokens=8, frequency_penalty=2.0).choices[0].text
    assert repeated != penalised


@pytest.mark.slow
def test_answer_up_to_the_model_length(client: OpenAI) -> None:
    """The last position can be used; asking for more gives what fits."""
    prompt = [1000 + index % 500 for index in range(MAX_MODEL_LEN - 6)]
    for asked in (6, 7):
        answer = complete(client, prompt, max_tokens=asked, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 6
        assert answer.choices[0].finish_reason == "length"
