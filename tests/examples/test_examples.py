"""Every program of `examples/` runs as its docstring says, on the CPU reference device."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tests.server.server import OFFLINE, Server, start_server
from tests.warm_process import WarmProcess, kind_of_device
from vllm_gaudi_ucm.graphs.strategies.file import read_bucket_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 240  # for a busy machine; a quiet one takes half a minute


def run(name: str, *arguments: str, folder: Path) -> str:
    """What a program prints; it must end with status 0."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | OFFLINE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_warm(name: str, *arguments: str, folder: Path) -> str:
    """The same from a process that has imported vLLM, whose engine forks: that an engine's process imports the program
    again, others show."""
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    env = {**own, **OFFLINE, "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    log = folder / "printed.txt"
    command = (str(EXAMPLES / name), *arguments)
    process = WarmProcess(run_program, command, log=log, env=env, cwd=folder, kind=kind_of_device())
    assert process.finish(SECONDS) == 0, log.read_text()[-6000:]
    return log.read_text()


def run_program(*command: str) -> None:
    sys.argv = [*command]
    runpy.run_path(command[0], run_name="__main__")


@pytest.fixture
def server(smollm2: Path, tmp_path: Path) -> Iterator[Server]:
    server = start_server(smollm2, tmp_path)
    yield server
    server.kill()


@pytest.mark.slow
def test_offline_batch(smollm2: Path, tmp_path: Path) -> None:
    printed = run_warm("offline_batch.py", "--model", str(smollm2), folder=tmp_path)
    assert "Jupiter" in printed
    # prompts that arrive one by one make more than one step with a causal part
    assert re.search(r"^steps: \d x c--, .*\d+ x --u", printed, re.M), printed[-2000:]


def test_openai_client(server: Server, tmp_path: Path) -> None:
    printed = run("openai_client.py", "--base-url", f"{server.url}/v1", folder=tmp_path)
    pieces = re.findall(r"-> .*Paris.* \(first token after \d+ ms, (\d+) pieces\)", printed)
    assert len(pieces) == 1
    assert int(pieces[0]) > 1
    assert "Name three colours. -> " in printed


def test_tune_buckets(tmp_path: Path) -> None:
    printed = run("tune_buckets.py", folder=tmp_path)
    read_bucket_file(tmp_path / "buckets.yaml")  # raises where it cannot be served
    tuned, blind = (float(ratio) for ratio in re.findall(r"padding +([\d.]+)x the true cost", printed))
    assert tuned < blind


@pytest.mark.slow
def test_own_sparse_method(tiny_text_model: Path, tmp_path: Path) -> None:
    printed = run("own_sparse_method.py", "--model", str(tiny_text_model), folder=tmp_path)
    assert "Sparse method Stride: contexts of 128 tokens and more can be sparse" in printed
    answers = dict(re.findall(r"^(sparse|dense ) '(.*)'$", printed, re.M))
    assert len(answers) == 2
    assert answers["sparse"] != answers["dense "]  # what it leaves out is missed


@pytest.mark.slow
def test_own_store(tiny_text_model: Path, tmp_path: Path) -> None:
    printed = run_warm("own_store.py", "--model", str(tiny_text_model), folder=tmp_path)
    found = re.findall(r"^(first|again): (\d+) of 325 tokens were stored$", printed, re.M)
    assert dict(found) == {"first": "0", "again": "320"}, printed[-2000:]


BLOCKS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "first"}


def answering_server(seen: list[dict[str, Any]], answer: dict[str, Any], status: int = 200) -> httpx.AsyncClient:
    app = FastAPI()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> JSONResponse:
        seen.append(await request.json())
        return JSONResponse(answer, status)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize("status", [200, 500])
def test_two_engines(status: int) -> None:
    """Prompts go to one server, and answers come from the other, with applications in place of both."""
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    answer = {"kv_transfer_params": BLOCKS}
    make_proxy = runpy.run_path(str(EXAMPLES / "two_engines.py"))["make_proxy"]

    async def ask() -> httpx.Response:
        proxy = make_proxy(answering_server(first, answer, status), answering_server(second, {"text": "four"}))
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


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_is_short_tested_and_named(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 125
    assert f'"{name}"' in Path(__file__).read_text(encoding="utf-8")
    for page in ("README.md", "docs/getting-started.md"):
        assert f"examples/{name}" in (ROOT / page).read_text(encoding="utf-8"), page
