"""The benchmark of experts runs on a CPU, and its sides give the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import moe


def test_the_sides_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(moe, "REPEATS", 1)
    monkeypatch.setitem(moe.SHAPES, "small", moe.Shape(4, 2, 64, 32, 2))
    moe.main(["--rows", "1", "5", "--json", str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    names = {one["side"] for one in found}
    assert {
        "ours (cpu)",
        "ours (cpu, 8-bit floats)",
        "ours (cpu, MXFP4)",
        "torch, grouped product",
        "torch, loop of experts",
    } <= names
    assert len(found) == 2 * len(names)
    assert all(one["error"] < 1e-4 and one["ms"] > 0 and one["bytes_ms"] > 0 for one in found)
    assert "WRONG" not in capsys.readouterr().out


def test_a_wrong_result_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "REPEATS", 1)
    monkeypatch.setattr(moe, "sides", lambda weights: [("zeros", False, lambda: [lambda x, *_: torch.zeros_like(x)])])
    (found,) = moe.measure(moe.Shape(4, 2, 8, 8, 1), [3], "cpu", torch.float32, (1e9, 1e9))
    assert (found.note, found.error) == ("WRONG RESULT", 1.0)
