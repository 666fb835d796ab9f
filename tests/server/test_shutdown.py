"""SIGTERM in the middle of a stream: the server and its engine leave soon, and nothing but a phase log."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.conftest import CLIENT_OPTIONS
from tests.server.metrics import read_metrics
from tests.server.server import MODEL_NAME, STOP_SECONDS, start_server
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts servers of its own


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the server's own files."""
    # vLLM's sockets lie there, whose paths have at most 107 characters: a test's own folder may be too deep
    folder = Path(tempfile.mkdtemp(prefix="ucm-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_sigterm_in_the_middle_of_a_stream(tiny_text_model: Path, tmp_path: Path, temporary: Path) -> None:
    """Its files are there, for this user alone, while it serves (also with --disable-log-stats); then they are gone."""
    server = start_server(tiny_text_model, tmp_path, "--disable-log-stats", "--max-model-len", "8192", cold=True)
    started = threading.Event()
    ended: list[str] = []

    def read() -> None:
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "Count: 1 2 3", "max_tokens": 8000}
        try:
            with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
                for chunk in client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
                    started.set()
                    if chunk.choices[0].finish_reason:
                        ended.append(chunk.choices[0].finish_reason)
        except (openai.APIError, httpx.TransportError) as error:
            ended.append(type(error).__name__)

    reader = threading.Thread(target=read)
    try:
        (metrics,) = temporary.glob("gaudi-ucm-metrics-*")
        assert metrics.stat().st_mode & 0o777 == 0o700
        assert read_metrics(server)["gaudi_ucm_steps_total", "--u"] == 0
        reader.start()
        assert started.wait(60)
        assert server.terminate() < STOP_SECONDS
        reader.join(60)
        assert not reader.is_alive(), "the client still waits for a server that is gone"
        assert ended, "the stream ended as if it were complete"
        assert "length" not in ended
        _, steps = read_phase_log(server.phase_log)
        assert steps
        assert "attention work:" in server.log(), "no summary of the phases at exit"
        assert not metrics.exists(), server.log_tail()
        assert server.process.poll() == 0
        for noise in ("nanobind: leaked", "EngineDeadError", "requires Triton", "disabled by user settings"):
            assert noise not in server.log()
    finally:
        server.kill()
        if reader.ident is not None:
            reader.join(60)
