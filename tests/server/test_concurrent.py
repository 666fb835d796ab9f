"""Many requests at once: each gets the answer it gets alone, whoever else is in the batch or leaves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.jobs import Alone, Job, mixed_jobs
from tests.server.server import HTTP, MODEL_NAME, Server
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # many requests at once

# Runs for long unless somebody ends it.
ENDLESS: dict[str, Any] = {"model": MODEL_NAME, "prompt": "Count: 1 2 3", "max_tokens": 1000, "ignore_eos": True}


async def streamed(client: AsyncOpenAI, job: Job, salt: str, leave_after: int | None = None) -> str:
    """The text of a streamed completion; `leave_after` chunks the client closes the connection."""
    parts: list[str] = []
    async with await client.completions.create(**job.arguments(salt), stream=True) as stream:
        async for chunk in stream:
            parts.append(chunk.choices[0].text)
            if leave_after is not None and len(parts) >= leave_after:
                break
    return "".join(parts)


def test_32_concurrent_requests(server: Server, async_client: Callable[[], AsyncOpenAI], alone: Alone) -> None:
    """Each answer equals the same request's alone, and the steps were of mixed phases. covers: A1, A4, A6, A8"""
    jobs = mixed_jobs(32)

    async def together() -> list[str]:
        async with async_client() as client:
            return await asyncio.gather(*(streamed(client, job, "together") for job in jobs))

    first_step = len(read_phase_log(server.phase_log)[1])
    answers = asyncio.run(together())
    server.wait_idle()
    steps = read_phase_log(server.phase_log)[1][first_step:]
    assert answers == [alone(job) for job in jobs]

    phases = {step.bucket.phase for step in steps}
    assert "csu" in phases, phases
    assert phases & {"--u", "-su"}, phases
    assert max(step.requests for step in steps) >= 16
    assert max(step.prompts for step in steps) >= 2
    assert any(0 < step.prompts < step.requests for step in steps), "no step had prompts and decodes together"


def test_disconnected_client_is_aborted(server: Server, client: OpenAI, alone: Alone) -> None:
    """covers: A7 (an aborted request gives its blocks back)"""
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        first = json.loads(next(line for line in lines if line).removeprefix("data: "))
        assert first["choices"][0]["text"]
        assert server.metric("vllm:num_requests_running") == 1
    assert server.wait_idle() < 30
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    job = mixed_jobs()[0]
    assert client.completions.create(**job.arguments("afterwards")).choices[0].text == alone(job)


def test_client_that_gives_up_waiting_is_aborted(server: Server) -> None:
    """A request that is not streamed ends with its connection, too, and without any output yet."""
    try:
        HTTP.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=1.0)
    except httpx.ReadTimeout:
        assert server.wait_idle() < 30
    else:
        raise AssertionError("1000 tokens in a second")


def test_eight_of_sixteen_streams_leave(server: Server, async_client: Callable[[], AsyncOpenAI], alone: Alone) -> None:
    """covers: A7, A8 (rows of those who stay do not move to others' tokens)"""
    jobs = mixed_jobs(16)

    async def together() -> list[str]:
        async with async_client() as client:
            leave = {index: 1 + index % 5 for index in range(0, 16, 2)}
            return await asyncio.gather(
                *(streamed(client, job, "half leave", leave.get(index)) for index, job in enumerate(jobs))
            )

    answers = asyncio.run(together())
    assert answers[1::2] == [alone(job) for job in jobs[1::2]]
    for job, part in zip(jobs[::2], answers[::2], strict=True):
        assert alone(job).startswith(part)
    assert server.wait_idle() < 30
