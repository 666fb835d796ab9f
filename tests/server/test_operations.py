"""What an operator asks of a running server: a profile, its load, and requests whose thinking ends."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def operated(smollm2: Path, profiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(profiles), "torch_profiler_with_stack": False}
    reasoning = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    server = start_server(
        smollm2,
        tmp_path_factory.mktemp("operated"),
        *("--profiler-config", json.dumps(profiler), "--reasoning-config", json.dumps(reasoning)),
        "--enable-server-load-tracking",
    )
    try:
        yield server
        server.terminate()
    finally:
        server.kill()


def post(server: Server, path: str, **body: Any) -> Any:
    return HTTP.post(f"{server.url}{path}", json=body).raise_for_status().json()


def complete(server: Server, prompt: Any, **options: Any) -> str:
    asked = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 24, **options}
    return str(post(server, "/v1/completions", prompt=prompt, **asked)["choices"][0]["text"])


def test_a_profile(operated: Server, profiles: Path) -> None:
    """The worker writes one file, and the API server another; a wrong prefix is an error to its caller alone."""
    answer = complete(operated, "One two three")
    assert HTTP.post(f"{operated.url}/start_profile", json={"profile_prefix": "../up"}).status_code >= 400
    assert HTTP.post(f"{operated.url}/start_profile", json={"profile_prefix": "served"}).status_code == 200
    assert complete(operated, "One two three") == answer
    assert HTTP.post(f"{operated.url}/stop_profile").status_code == 200
    names = [file.name for file in profiles.glob("served_*.pt.trace.json.gz")]
    (worker,) = (name for name in names if "rank" in name)
    assert len(names) == 2
    trace = json.loads(gzip.decompress((profiles / worker).read_bytes()))
    found = {event["name"].split(" q")[0] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"plan", "forward --u", "logits", "sample", "finish"} <= found
    assert complete(operated, "One two three") == answer


def test_the_load(operated: Server) -> None:
    def load() -> int:
        return int(HTTP.get(f"{operated.url}/load").raise_for_status().json()["server_load"])

    assert load() == 0
    body = {"model": MODEL_NAME, "prompt": "One", "max_tokens": 64, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{operated.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert load() == 1
        for _ in lines:
            pass
    operated.wait_idle()
    assert load() == 0


@pytest.mark.parametrize("budget", [0, 7])
def test_thinking_ends(operated: Server, budget: int) -> None:
    """The markers are several tokens of this tokenizer."""

    def tokens(text: str) -> list[int]:
        return list(post(operated, "/tokenize", model=MODEL_NAME, prompt=text, add_special_tokens=False)["tokens"])

    prompt = tokens("What is two and two?\n") + tokens("<think>")
    free = complete(operated, prompt, ignore_eos=True)
    assert "</think>" not in free
    text = complete(operated, prompt, ignore_eos=True, thinking_token_budget=budget)
    thought, marker, _ = text.partition("</think>")
    assert marker
    assert len(tokens(thought)) <= budget
    assert free.startswith(thought)
