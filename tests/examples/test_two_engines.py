"""The proxy of `examples/two_engines.py`, with applications in place of its two servers."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

BLOCKS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "first"}


def load_example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "two_engines.py"
    spec = importlib.util.spec_from_file_location("two_engines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def server(seen: list[dict[str, Any]], answer: dict[str, Any], status: int = 200) -> httpx.AsyncClient:
    app = FastAPI()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> JSONResponse:
        seen.append(await request.json())
        return JSONResponse(answer, status)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize("status", [200, 500])
def test_prompts_go_to_one_server_and_answers_come_from_the_other(status: int) -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    answer = {"kv_transfer_params": BLOCKS}

    async def ask() -> httpx.Response:
        proxy = load_example().make_proxy(server(first, answer, status), server(second, {"text": "four"}))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://proxy") as client:
            body = {"prompt": "two and two", "max_tokens": 9, "stream": True, "kv_transfer_params": {"remote_port": 1}}
            return await client.post("/v1/completions", json=body)

    found = asyncio.run(ask())
    assert (found.status_code, found.json()) == (200, {"text": "four"})
    assert [(one["max_tokens"], one["stream"], one["kv_transfer_params"]["do_remote_decode"]) for one in first] == [
        (1, False, True)
    ]
    expected = {"kv_transfer_params": BLOCKS} if status == 200 else {}
    assert second == [{"prompt": "two and two", "max_tokens": 9, "stream": True, **expected}]
