"""One server for all tests of this room, its clients, and its log beside the report of a failed test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.jobs import Alone
from tests.server.server import Server, start_server

CLIENT_OPTIONS: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 240}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server):
        report.sections.append(("server log", server.log_tail()))
    return report


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose steps hold at most 512 tokens, so that long prompts are computed in chunks."""
    server = start_server(smollm2, tmp_path_factory.mktemp("server"), "--max-num-batched-tokens", "512")
    try:
        yield server
        server.terminate()
    finally:
        server.kill()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
        yield client


@pytest.fixture(scope="session")
def alone(client: OpenAI) -> Alone:
    return Alone(client)


@pytest.fixture(scope="session")
def async_client(server: Server) -> Callable[[], AsyncOpenAI]:
    """Makes a client for one event loop; close it with `async with`."""
    return lambda: AsyncOpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS)
