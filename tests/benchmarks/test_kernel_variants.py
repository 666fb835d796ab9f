"""How many kernels the graphs of a server have, counted in a process that passes for one with a Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernel_variants

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
MOST = 37  # of the 8B shape; each takes about a second and a half to compile, by itself


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "benchmarks.kernel_variants", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow  # starts a process
def test_sizes_of_buckets_make_few_variants() -> None:
    """Rows, blocks and pointers of a bucket are run-time values: a set of 43 buckets has few more kernels than the
    largest bucket of each phase."""
    done = _run("--requests", "16", "--verbose")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    every, largest = next((int(line[1]), int(line[2])) for line in lines if line[:1] == ["all"] and len(line) == 3)
    assert 20 < largest <= every <= MOST
    variants = [line for line in done.stdout.splitlines() if "('constexpr'" in line or "('*i64'" in line]
    assert len(variants) == every
    # a pointer that is no multiple of 16 would be one more variant of each kernel that reads a step's tensors
    assert not [line for line in variants if "('*i64', '')" in line]


def test_an_interpreter_has_no_variants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        kernel_variants.main([])
    assert "expected it unset or 0" in capsys.readouterr().err
