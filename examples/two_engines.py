"""A proxy for two servers: one computes prompts, the other one reads their KV blocks through NIXL and decodes.

    CONFIG='{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
    VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve MODEL --port 8100 --kv-transfer-config "$CONFIG"
    VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve MODEL --port 8200 --kv-transfer-config "$CONFIG"
    python examples/two_engines.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Clients then use http://127.0.0.1:8000/v1. If the first server does not answer, the second one computes the prompt, too.
fastapi, httpx and uvicorn come with vLLM.
"""

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

logger = logging.getLogger("two_engines")

ONE_TOKEN = {"max_tokens": 1, "min_tokens": 0, "stream": False, "stream_options": None, "n": 1}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


async def prompt_blocks(prefill: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Has the first server compute the prompt; returns where its blocks are, None if it does not answer."""
    first = {**body, **ONE_TOKEN, "kv_transfer_params": PREFILL}
    if "max_completion_tokens" in body:
        first["max_completion_tokens"] = 1
    try:
        answer = await prefill.post(path, json=first)
        answer.raise_for_status()
        blocks: dict[str, Any] | None = answer.json().get("kv_transfer_params")
    except (httpx.HTTPError, ValueError) as error:
        logger.warning("%s: the prompt is computed by the second server (%s)", path, error)
        return None
    return blocks


def make_proxy(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> FastAPI:
    """Returns the application; it closes both clients at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await prefill.aclose()
        await decode.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        answer = await decode.get("/v1/models")
        return JSONResponse(answer.json(), answer.status_code)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        path = request.url.path
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return JSONResponse({"error": {"message": "the body is not a JSON object"}}, 400)
        # what a client says about blocks would let it read other clients' blocks
        body.pop("kv_transfer_params", None)
        blocks = await prompt_blocks(prefill, path, body)
        if blocks is not None:
            body["kv_transfer_params"] = blocks
        try:
            answer = await decode.send(decode.build_request("POST", path, json=body), stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"the second server does not answer ({error})"}}, 502)
        kind = answer.headers.get("content-type", "application/json")
        close = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind, background=close)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Sends prompts to one server and their decoding to another.")
    parser.add_argument("--prefill", default="http://127.0.0.1:8100", help="default: %(default)s")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1; default: %(default)s")
    options = parser.parse_args()
    clients = (httpx.AsyncClient(base_url=url, timeout=None) for url in (options.prefill, options.decode))
    uvicorn.run(make_proxy(*clients), host="127.0.0.1", port=options.port)
