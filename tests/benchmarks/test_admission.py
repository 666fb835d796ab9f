"""The benchmark of admission: its server under both rules, its figures and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import admission


def test_exact_never_preempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--mix", "batch", "--blocks", "0.15", "--steps", "600", "--seeds", "1"]
    arguments += ["--json", str(figures), "--plot", str(picture)]
    assert admission.main(arguments) == 0
    found = {one["rule"]: one for one in json.loads(figures.read_text())}
    assert found["greedy"]["preemptions"] > 5
    assert found["exact"]["preemptions"] == found["exact"]["computed_again"] == 0
    assert found["exact"]["memory"] + 0.1 < found["greedy"]["memory"]
    assert found["greedy, kept"]["preemptions"] > 5
    assert found["greedy, kept"]["computed_again"] == 0
    assert picture.stat().st_size > 10_000
    assert "greedy, kept" in capsys.readouterr().out
