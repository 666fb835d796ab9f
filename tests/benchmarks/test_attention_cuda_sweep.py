"""The sweep of attention on a GPU: its grid, and what it says of what was measured elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.attention_cuda_case import Case
from benchmarks.attention_cuda_result import OURS, Result
from benchmarks.attention_cuda_sweep import OWN, PREFIXES, REQUESTS, cases, sweep


def test_the_grid() -> None:
    """Every request has its own tokens beside the prefix, which one request alone shares with nobody."""
    grid = list(cases())
    assert len(grid) == len(REQUESTS) * len(PREFIXES)
    for case in grid:
        assert len(set(case.requests)) == 1
        one = case.requests[0]
        assert one.prefix == (one.cached + 1 - OWN if len(case.requests) > 1 else 0)


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ({"triton 2d": 2.0, "triton 3d": 0.5}, "slower than vLLM's Triton kernels: 1 decodes, prefix 0 (0.50x), "),
        ({"triton 2d": 2.0, "triton 3d": 1.5}, "slower than vLLM's Triton kernels: in no cell"),
        ({}, "not compared: vLLM's Triton kernels cannot be imported here"),
    ],
)
def test_the_verdict(peers: dict[str, float], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The better of the peer's kernels counts; without it nothing is claimed."""

    def measure(case: Case) -> Result:
        own = 1.5 if case.name == "mixed" else 1.0
        return Result(case.name, 0.0, 0.0, 0.0, {OURS: own, **peers}, {OURS: 1e-3})

    table = io.StringIO()
    found = sweep(measure, Console(file=table, width=160))
    printed = capsys.readouterr().out
    assert said in printed
    assert "1.50x the longer one" in printed
    assert len(found) == len(REQUESTS) * len(PREFIXES) + 3
    assert "32768 + 512" in table.getvalue()
