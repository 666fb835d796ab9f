"""Two servers over NIXL behind the example's proxy: one computes prompts, the other one answers, alone if it must."""

from __future__ import annotations

import asyncio
import json
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.server.server import MODEL_NAME, Server, start_server

pytest.importorskip("nixl", reason="the package nixl is not installed")
pytestmark = pytest.mark.slow  # starts servers of its own

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_engines.py"
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
PROMPTS = [" ".join(f"{number} times {factor} is {number * factor}." for number in range(40)) for factor in (3, 7)]


def ask(first: Server, second: Server, prompt: str) -> str:
    """Returns the answer of the proxy."""
    make_proxy = runpy.run_path(str(EXAMPLE))["make_proxy"]

    async def through_proxy() -> httpx.Response:
        clients = [httpx.AsyncClient(base_url=server.url, timeout=120) for server in (first, second)]
        transport = httpx.ASGITransport(make_proxy(*clients))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=240) as client:
            return await client.post("/v1/completions", json=request(prompt))

    return text_of(asyncio.run(through_proxy()))


def request(prompt: str) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_two_servers_and_the_proxy(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Server] = []
    with ExitStack() as running:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
            options = ("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(TRANSFER))
            servers.append(start_server(smollm2, folder, *options))
            running.callback(servers[-1].kill)
        first, second = servers
        alone = [text_of(httpx.post(f"{second.url}/v1/completions", json=request(one), timeout=120)) for one in PROMPTS]
        before = second.metric("vllm:external_prefix_cache_hits_total")
        assert ask(first, second, PROMPTS[0]) == alone[0]
        # all tokens of the prompt but the last one
        loaded = second.metric("vllm:external_prefix_cache_hits_total") - before
        assert loaded > 300, f"tokens that came from the first server: {loaded}"
        first.kill()
        assert ask(first, second, PROMPTS[1]) == alone[1]
        assert second.metric("vllm:external_prefix_cache_hits_total") - before == loaded
        second.terminate()
