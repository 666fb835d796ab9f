"""Stores of every kind, as the tests open them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.store.base import KvStore
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

BLOCK_BYTES = 4096
Open = Callable[..., Any]


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(redis_session: RedisServer) -> RedisServer:
    """An empty server, which the test leaves running."""
    redis_session.client().flushall()
    return redis_session


@pytest.fixture(params=["memory", "file", "redis", "tiered"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of each kind, a new place for each test."""
    if request.param == "file":
        return {"kind": "file", "path": str(tmp_path / "store"), "deadline": 20.0}
    if request.param == "redis":
        return {"kind": "redis", "url": request.getfixturevalue("redis_server").url, "deadline": 20.0}
    if request.param == "tiered":
        behind = {"kind": "file", "path": str(tmp_path / "store"), "deadline": 20.0}
        return {"kind": "tiered", "front": {"capacity": "64KiB", "pin": False}, "behind": behind}
    return {"kind": "memory"}


@pytest.fixture
def open_one() -> Iterator[Open]:
    """Opens stores from mappings; closes at the end what is open then."""
    opened: list[KvStore] = []

    def open_it(options: dict[str, Any], block_bytes: int = BLOCK_BYTES) -> KvStore:
        opened.append(open_store(resolve_store_options(options), block_bytes))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(options: dict[str, Any], open_one: Open) -> Any:
    return open_one(options)
