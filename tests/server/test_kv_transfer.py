"""Servers whose prompts come from a store: two that share a Redis server, and one that starts again over its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.prefetch.stores import eventually
from tests.server.conftest import CLIENT_OPTIONS
from tests.server.metrics import read_metrics
from tests.server.server import MODEL_NAME, Server, start_server
from tests.store.redis_server import RedisServer, needs_redis

pytestmark = pytest.mark.slow  # starts servers of its own

BLOCK = 32
PROMPT = " ".join(f"{number} times three is {3 * number}." for number in range(1, 60))
OTHER = " ".join(f"{number} times seven is {7 * number}." for number in range(1, 60))


@contextmanager
def serving(model: Path, folder: Path, store: dict[str, Any]) -> Iterator[Server]:
    transfer = {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }
    folder.mkdir()
    server = start_server(model, folder, "--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(transfer))
    try:
        yield server
    finally:
        # without a goodbye: what a store holds does not depend on one
        server.kill()


def answer(server: Server, prompt: str = PROMPT, salt: str | None = None) -> str:
    with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
        completion = client.completions.create(
            model=MODEL_NAME,
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True, **({} if salt is None else {"cache_salt": salt})},
        )
    return completion.choices[0].text


def blocks(server: Server, event: str) -> float:
    return read_metrics(server).get(("gaudi_ucm_kv_blocks_total", event), 0)


def wait_saved(server: Server, at_least: int) -> None:
    assert eventually(lambda: blocks(server, "saved") >= at_least, 60), server.log_tail()


def test_two_servers_share_a_redis_server(tiny_text_model: Path, tmp_path: Path) -> None:
    """covers: D1 D4. One finds what the other has computed; when Redis is killed both go on, and answer the same."""
    needs_redis()
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    store = {"kind": "redis", "url": redis.url, "deadline": 10.0}
    try:
        with (
            serving(tiny_text_model, tmp_path / "one", store) as one,
            serving(tiny_text_model, tmp_path / "two", store) as two,
        ):
            first = answer(one)
            assert blocks(one, "loaded") == 0
            wait_saved(one, 10)
            assert answer(two, salt="another") == first
            assert blocks(two, "loaded") == 0, "a salt of its own never hits"
            assert answer(two) == first
            assert eventually(lambda: blocks(two, "loaded") >= 10), two.log_tail()
            hits = blocks(two, "loaded")
            redis.kill()
            assert answer(one, OTHER) == answer(two, OTHER)
            assert answer(two, OTHER, salt="third") == answer(one, OTHER, salt="third")
            assert blocks(two, "loaded") == hits
    finally:
        redis.kill()


def test_the_second_start_finds_what_the_first_has_stored(tiny_text_model: Path, tmp_path: Path) -> None:
    """covers: D3. A folder outlasts its server; nothing of the prompt but its end is computed again."""
    store = {"kind": "file", "path": str(tmp_path / "kv"), "deadline": 10.0}
    with serving(tiny_text_model, tmp_path / "first", store) as server:
        first = answer(server)
        wait_saved(server, 10)
    with serving(tiny_text_model, tmp_path / "second", store) as server:
        assert answer(server) == first
        assert eventually(lambda: blocks(server, "loaded") >= 10), server.log_tail()
