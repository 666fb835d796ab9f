"""Signals while a server starts, and a server that is killed: everything ends soon, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.server import MODEL_NAME, Server, start_server
from vllm_gaudi_ucm.vllm_api.engine_process import GRACE_SECONDS, POLL_SECONDS

pytestmark = pytest.mark.slow  # starts servers of its own

# a request that a tiny model computes for longer than a test waits
LONG = ("--max-model-len", "8192")
TERMINATED = 128 + signal.SIGTERM
# vLLM gives an engine 5 s that it cannot be asked in; the rest is for a machine that does something else as well
SECONDS = 60
# what the log says at moments of a start: the server has its configuration; it waits for the engine, which has none of
# the model, or packs its weights; everything is loaded and routes are made
MOMENTS = ("Asynchronous scheduling is off", "Initializing a V1 LLM engine", "Loading weights took", "Supported tasks")


def is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def everything_ends(server: Server, signal_number: int, seconds: float = SECONDS) -> int | None:
    """Sends it to the server; its exit status, when neither it nor a process that it has started is left."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    begin = time.monotonic()
    server.process.send_signal(signal_number)
    try:
        status = server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"running {seconds} s after signal {signal_number}:\n{server.log_tail()}")
    finally:
        server.children = children
    _, orphans = psutil.wait_procs(children, timeout=seconds - (time.monotonic() - begin))
    # a zombie has ended; whoever adopts orphans here may not ask for its status
    orphans = [process for process in orphans if not is_zombie(process)]
    assert not orphans, f"processes outlive the server: {orphans}\n{server.log_tail()}"
    return status


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_while_it_starts(tiny_text_model: Path, tmp_path: Path, moment: str) -> None:
    """vLLM lost the signal while the server waited for the engine, and went on to serve. covers: F12"""
    server = start_server(tiny_text_model, tmp_path, ready=False)
    try:
        server.wait_log(moment)
        assert everything_ends(server, signal.SIGTERM) == TERMINATED
        assert "force killing" not in server.log()
        assert "Application startup complete" not in server.log()
    finally:
        server.kill()


def test_killed_while_its_engine_imports(tiny_text_model: Path, tmp_path: Path) -> None:
    """The engine would wait five minutes for an answer of the server, before it has any worker. covers: F12"""
    server = start_server(tiny_text_model, tmp_path, ready=False, forks_engine=False)
    try:
        server.wait_log("Asynchronous scheduling is off")
        process = psutil.Process(server.process.pid)
        while not any("spawn_main" in " ".join(child.cmdline()) for child in process.children()):
            assert server.process.poll() is None
            time.sleep(0.05)
        assert "Initializing a V1 LLM engine" not in server.log()
        # its imports come first, which take as long as the machine is busy
        everything_ends(server, signal.SIGKILL, 3 * SECONDS)
    finally:
        server.kill()


def test_killed_in_the_middle_of_a_step(tiny_text_model: Path, tmp_path: Path) -> None:
    """The engine ends with it, and aborts what it was computing. covers: F12"""
    server = start_server(tiny_text_model, tmp_path, *LONG)

    def ask() -> None:
        body = {"model": MODEL_NAME, "prompt": "Count: 1 2 3", "max_tokens": 8000, "ignore_eos": True}
        with httpx.Client(timeout=60) as client, pytest.raises(httpx.TransportError):
            client.post(f"{server.url}/v1/completions", json=body)

    client = threading.Thread(target=ask)
    client.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not server.phase_log.exists() or len(server.phase_log.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        begin = time.monotonic()
        everything_ends(server, signal.SIGKILL)
        assert time.monotonic() - begin < POLL_SECONDS + GRACE_SECONDS + 20
        log = server.log()
        assert f"Process {server.process.pid}, which started EngineCore, is gone" in log
        assert "attention work:" in log, "no summary of the phases at exit"
    finally:
        server.kill()
        client.join(60)
