"""The build of torch that set-up takes: for the CPU where there is no GPU, unless the caller says otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

pytestmark = [
    pytest.mark.slow,  # starts processes
    pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver"),
]


class Index(BaseHTTPRequestHandler):
    """Has the page of torch, and no other."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/cpu"
    server.shutdown()
    server.server_close()


def torch_args(index: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    without = ("PIP_", "http_proxy", "HTTP_PROXY")
    env = {name: value for name, value in os.environ.items() if not name.startswith(without)} | variables
    env |= {"PIP_CONFIG_FILE": variables.get("PIP_CONFIG_FILE", os.devnull), "PATH": f"{path}:{env['PATH']}"}
    command = ["bash", str(ROOT / "scripts/torch_args.sh"), sys.executable, index]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)


def test_without_a_gpu_the_index_of_cpu_builds(index: str) -> None:
    assert torch_args(index).stdout == f"--index-url {index}\n"


def test_with_a_gpu_plain_pip(index: str, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nexit 0\n")
    driver.chmod(0o755)
    assert torch_args(index, path=str(tmp_path)).stdout == ""


def test_an_index_of_the_user_stays(index: str) -> None:
    assert torch_args(index, PIP_INDEX_URL="http://127.0.0.1:9/simple").stdout == ""


def test_an_index_that_is_not_reached(index: str) -> None:
    """Nobody listens, nobody answers, or it does not have torch."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for unreached in ("http://127.0.0.1:9", f"http://127.0.0.1:{port}", f"{index}/other"):
            found = torch_args(unreached)
            assert found.stdout == ""
            assert f"torch: {unreached} is not reached" in found.stderr


@pytest.mark.parametrize("given", ["--pre", ""])
def test_the_caller_wins(given: str) -> None:
    rule = "show: ; @echo '[$(TORCH_ARGS)] [$(WINDOW_TORCH_ARGS)]'"
    command = ["make", "--silent", "--eval", rule, "show", f"TORCH_ARGS={given}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == f"[{given}] [{given}]\n"


def test_the_image_takes_the_same() -> None:
    text = (ROOT / "docker/Dockerfile.cpu").read_text()
    assert "COPY scripts/torch_args.sh scripts/" in text
    assert "ARG TORCH_ARGS\n" in text, "a default would win over the script"
    assert "${TORCH_ARGS-$(bash scripts/torch_args.sh)} torch==" in text
