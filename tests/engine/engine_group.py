"""Engines behind one front, each in a process of its own: data parallelism without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import RequestOutput
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.serving import TINY_OPTIONS, Answer, answer_of, greedy_params
from tests.engine.worker_processes import CountedWorker


def serve_by_engines(
    model: Path,
    ucm: Mapping[str, Any],
    prompts: list[Any],
    length: int,
    count: int,
    counted: bool = False,
    **options: Any,
) -> list[list[Answer]]:
    """Answers all prompts by each engine while the others have none; then shared out in turn among all of them.

    counted: whether their cards count compilations. Raises AssertionError if one compiles after its start.
    """
    asked = {"additional_config": {"ucm": dict(ucm)}, "data_parallel_size": count, **options}
    if counted:
        asked["worker_extension_cls"] = f"{CountedWorker.__module__}.{CountedWorker.__qualname__}"
    return asyncio.run(_serve({"model": str(model), **TINY_OPTIONS, **asked}, prompts, length, count, counted))


async def _serve(
    options: dict[str, Any], prompts: list[Any], length: int, count: int, counted: bool
) -> list[list[Answer]]:
    engines = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def compilations() -> Any:
        client: Any = engines.engine_core
        called = ("collective_rpc", "count_compilations", None, (), None)
        return await client.call_utility_all_async(*called) if counted else None

    async def answer(index: int, engine: int, turn: int) -> Answer:
        prompt = prompts[index]
        inputs: Any = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        found: RequestOutput | None = None
        name = f"{turn}-{index}"
        async for output in engines.generate(inputs, greedy_params(length), name, data_parallel_rank=engine):
            found = output
        assert found is not None, "an answer has a token at least"
        return answer_of(found)

    numbers = range(len(prompts))
    turns = [[engine] * len(prompts) for engine in range(count)] + [[index % count for index in numbers]]
    try:
        warm = await compilations()
        found = [
            list(await asyncio.gather(*(answer(index, turn[index], number) for index in numbers)))
            for number, turn in enumerate(turns)
        ]
        now = await compilations()
        assert now == warm, f"recipes of each engine: {warm} after its start, {now} after its requests"
        return found
    finally:
        engines.shutdown()
