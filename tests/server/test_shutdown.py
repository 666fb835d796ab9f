"""SIGTERM in the middle of a stream: the server and its engine leave soon, and leave a phase log that can be read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.conftest import CLIENT_OPTIONS
from tests.server.server import MODEL_NAME, STOP_SECONDS, start_server
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts servers of its own


def test_sigterm_in_the_middle_of_a_stream(smollm2: Path, tmp_path: Path) -> None:
    server = start_server(smollm2, tmp_path, cold=True)
    started = threading.Event()
    ended: list[str] = []

    def read() -> None:
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "Count: 1 2 3", "max_tokens": 1900}
        try:
            with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
                for chunk in client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
                    started.set()
                    if chunk.choices[0].finish_reason:
                        ended.append(chunk.choices[0].finish_reason)
        except (openai.APIError, httpx.TransportError) as error:
            ended.append(type(error).__name__)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert started.wait(60)
        assert server.terminate() < STOP_SECONDS
        reader.join(10)
        assert not reader.is_alive(), "the client still waits for a server that is gone"
        assert ended, "the stream ended as if it were complete"
        assert "length" not in ended
        _, steps = read_phase_log(server.phase_log)
        assert steps
        assert "attention work:" in server.log(), "no summary of the phases at exit"
    finally:
        server.kill()
        reader.join(30)
