"""A real `vllm serve` in a process of its own, on loopback: started, watched, asked for its metrics, and stopped."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.ports import free_port
from tests.warm_process import WarmProcess, kind_of_device

MODEL_NAME = "smollm2"
MAX_MODEL_LEN = 1024
# Loading takes 8 s on two idle cores; the rest is for a machine that does something else as well.
START_SECONDS = 180
STOP_SECONDS = 30
# For all requests of tests on loopback: a client of one's own reads the machine's certificates first, 20 ms each.
HTTP = httpx.Client(verify=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def serve_command(*arguments: str) -> list[str]:
    """The command line of `vllm serve` with this interpreter."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]


def serve(arguments: list[str]) -> None:
    """What that command line does, in a process that has imported what it needs."""
    sys.argv = ["vllm", "serve", *arguments]
    command = importlib.import_module("vllm.entrypoints.cli.main")
    command.main()


def environment() -> dict[str, str]:
    """Ours, less what tests of an engine in this process may have set: a server's engine has a process of its own."""
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return own | OFFLINE


@dataclass
class Server:
    """One running server; `log` takes everything that its processes print."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | WarmProcess
    children: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def phase_log(self) -> Path:
        return self.folder / "phases.jsonl"

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join([line for line in self.log().splitlines() if " Route: " not in line][-lines:])

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        lines = HTTP.get(f"{self.url}/metrics").raise_for_status().text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def wait_idle(self, seconds: float = 60) -> float:
        """Waits until no request runs or waits; the seconds that this took."""
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if not self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
                return time.monotonic() - begin
            time.sleep(0.1)
        raise AssertionError(f"requests are still running {seconds} s later:\n{self.log_tail()}")

    def wait_ready(self) -> None:
        """Waits for /health; a server that exits or takes too long is an error with its log."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if HTTP.get(f"{self.url}/health").status_code == 200:
                    self.children = psutil.Process(self.process.pid).children(recursive=True)
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start (exit status {self.process.poll()}):\n{self.log_tail(150)}")

    def wait_log(self, text: str) -> None:
        """Waits until a line of the log has this text: a moment of a start."""
        deadline = time.monotonic() + START_SECONDS
        while text not in self.log():
            assert self.process.poll() is None, f"ended before it logged {text!r}:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"did not log {text!r}:\n{self.log_tail()}"
            time.sleep(0.01)

    def terminate(self) -> float:
        """SIGTERM; the seconds until the server had exited by itself and left no process behind."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"running {STOP_SECONDS} s after SIGTERM:\n{self.log_tail()}") from None
        _, orphans = psutil.wait_procs(self.children, timeout=STOP_SECONDS)
        assert not orphans, f"processes outlive the server: {orphans}\n{self.log_tail()}"
        return time.monotonic() - begin

    def kill(self) -> None:
        """Ends whatever is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in self.children:
            if child.is_running():
                child.kill()


def start_server(
    model: Path,
    folder: Path,
    *options: str,
    cold: bool = False,
    forks_engine: bool = True,
    ready: bool = True,
    **more: Any,
) -> Server:
    """Starts `vllm serve` on a free port with a phase log in `folder`, and waits until it answers.

    cold: with its own command line, which imports everything twice; else the server and its engine fork (12 s less).
    forks_engine: else the engine of a server that forks imports everything.
    ready: else it returns at once, and the server has still to import and to load everything.
    more: options of the plugin.
    """
    port = free_port()
    # One thread: the HTTP server and the clients need the other core; threads that take turns are slow.
    ucm = {"phase_log": str(folder / "phases.jsonl"), "cpu": {"threads": 1}, **more}
    arguments = [
        *(str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"),
        *("--kv-cache-memory-bytes", str(800 << 20), "--additional-config", json.dumps({"ucm": ucm})),
        *options,
    ]
    server = Server(folder, port, _start(arguments, folder, cold, forks_engine))
    if not ready:
        return server
    try:
        server.wait_ready()
    except BaseException:
        server.kill()
        raise
    return server


def _start(arguments: list[str], folder: Path, cold: bool, forks_engine: bool) -> subprocess.Popen[bytes] | WarmProcess:
    log = folder / "server.log"
    if not cold:
        env = {**environment(), "VLLM_WORKER_MULTIPROC_METHOD": "fork" if forks_engine else "spawn"}
        return WarmProcess(serve, (arguments,), log=log, env=env, cwd=folder, kind=kind_of_device())
    with log.open("wb") as output:
        command = serve_command(*arguments)
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment())
