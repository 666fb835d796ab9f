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


def serve_by_engines(
    model: Path, ucm: Mapping[str, Any], prompts: list[list[int]], length: int, count: int, **options: Any
) -> list[list[Answer]]:
    """Of all prompts, by each engine while the others have none; then shared out in turn among all of them."""
    asked = {"additional_config": {"ucm": dict(ucm)}, "data_parallel_size": count, **options}
    return asyncio.run(_serve({"model": str(model), **TINY_OPTIONS, **asked}, prompts, length, count))


async def _serve(options: dict[str, Any], prompts: list[list[int]], length: int, count: int) -> list[list[Answer]]:
    engines = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def answer(index: int, engine: int, turn: int) -> Answer:
        inputs: Any = {"prompt_token_ids": prompts[index]}
        found: RequestOutput | None = None
        name = f"{turn}-{index}"
        async for output in engines.generate(inputs, greedy_params(length), name, data_parallel_rank=engine):
            found = output
        assert found is not None, "an answer has a token at least"
        return answer_of(found)

    numbers = range(len(prompts))
    turns = [[engine] * len(prompts) for engine in range(count)] + [[index % count for index in numbers]]
    try:
        return [
            list(await asyncio.gather(*(answer(index, turn[index], number) for index in numbers)))
            for number, turn in enumerate(turns)
        ]
    finally:
        engines.shutdown()
