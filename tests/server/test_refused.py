"""What is not supported ends `vllm serve` at start, with one error that says what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.server import environment, serve
from tests.warm_process import WarmProcess, kind_of_device

pytestmark = pytest.mark.slow  # starts servers of its own

CASES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "shared adapters": (
        ["--enable-lora", "--fully-sharded-loras"],
        ("does not support adapters (LoRA) whose matrices ranks share out", "--fully-sharded-loras"),
    ),
    "unknown key": (
        ["--additional-config", json.dumps({"ucm": {"attention": {"casual_slice": 512}}})],
        ("ucm.attention.casual_slice", "causal_slice"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_start(tiny_text_model: Path, tmp_path: Path, case: str) -> None:
    """covers: A18"""
    options, words = CASES[case]
    arguments = [str(tiny_text_model), "--host", "127.0.0.1", "--dtype", "float32", "--port", "0", *options]
    log = tmp_path / "log"
    process = WarmProcess(serve, (arguments,), log=log, env=environment(), cwd=tmp_path, kind=kind_of_device())
    assert process.finish(180) != 0
    last = log.read_text(errors="replace").strip().splitlines()[-8:]
    for word in words:
        assert any(word in line for line in last), f"{word!r} is not in the last lines:\n" + "\n".join(last)
