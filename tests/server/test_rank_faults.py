"""A worker of two that dies, is stopped or fails: within 30 s its client has an error, and no process is left."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.tiny_models import make_config, make_model
from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow  # starts servers of its own

SECONDS = 60
RANK = 1  # whose answers the engine does not wait for
LONG = ("--max-model-len", "16384")  # a stream that does not end before the fault, however quick a step is


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose heads two workers can share, with a tokenizer that knows its tokens."""
    folder = make_model(tmp_path_factory.mktemp("tiny"), make_config("llama", max_position_embeddings=16384))
    for file in smollm2.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def worker(server: Server) -> psutil.Process:
    """The process of that rank, which the log names."""
    (number,) = set(re.findall(rf"\(Worker_TP{RANK} pid=(\d+)\)", server.log()))
    return psutil.Process(int(number))


def kill(server: Server) -> None:
    worker(server).send_signal(signal.SIGKILL)


def stop(server: Server) -> None:
    worker(server).send_signal(signal.SIGSTOP)


def run_out_of_memory(server: Server) -> None:
    call = {"method": "run_out_of_memory", "args": [RANK]}
    HTTP.post(f"{server.url}/collective_rpc", json=call, timeout=30).raise_for_status()


FAULTS = [
    (kill, r"VllmWorker-1 died unexpectedly \(exit code: -9\)|rank 1 of 2 \(process \d+\) ended: killed"),
    (stop, r"VllmWorker-1 \(process \d+\) is stopped, and has not run for 5 s; it is killed"),
    (run_out_of_memory, r"rank 1 of 2 \(process \d+\) failed in execute_model: OutOfMemoryError: tried to allocate 7"),
]


def tokens_of_a_stream(server: Server) -> Iterator[bytes]:
    body = {"model": MODEL_NAME, "prompt": [5, 9, 31], "max_tokens": 16000, "ignore_eos": True, "stream": True}
    timeout = httpx.Timeout(240, read=240)
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=timeout) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield line.removeprefix("data: ").encode()


@pytest.mark.parametrize(("cause", "error"), FAULTS, ids=["killed", "stopped", "out of memory"])
def test_one_rank_ends_the_engine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Callable[[Server], None], error: str
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    extension = "tests.server.failing_worker.FailingWorker"
    server = start_server(tiny, tmp_path, "--tensor-parallel-size", "2", "--worker-extension-cls", extension, *LONG)
    try:
        stream = tokens_of_a_stream(server)
        assert "choices" in json.loads(next(stream))
        begin = time.monotonic()
        cause(server)
        ends = [line for line in _until_the_end(stream) if b"error" in line]
        assert time.monotonic() - begin < SECONDS, server.log_tail()
        assert ends, "the stream ended without an error"
        _, left = psutil.wait_procs([psutil.Process(server.process.pid), *server.children], timeout=SECONDS)
        assert not left, f"{left}\n{server.log_tail()}"
        assert re.search(error, server.log()), server.log_tail()
        assert server.process.wait(SECONDS) == 1, "a supervisor takes 0 for an end that was asked for"
        print(f"{time.monotonic() - begin:.1f} s until all processes had ended")
    finally:
        server.kill()


def _until_the_end(stream: Iterator[bytes]) -> Iterator[bytes]:
    """What still comes; a stream that is complete is an error."""
    try:
        for line in stream:
            assert json.loads(line).get("choices", [{}])[0].get("finish_reason") != "length", "the stream is complete"
            yield line
    except httpx.TransportError:
        yield b"error: the connection has ended"
