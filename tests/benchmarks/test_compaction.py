"""The benchmark of compaction: the order of its rules, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compaction


def test_compaction_is_densest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert compaction.main(["--steps", "3000", "--blocks", "600", "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 5_000
    assert "contiguous first" in capsys.readouterr().out
    ends = {}
    for rule in (compaction.RULES[0], compaction.RULES[2]):
        churn = compaction.Churn(rule, 600)
        for number in range(3000):
            churn.step(number)
        churn.look()
        ends[rule] = churn.densities[-1]
    assert ends["compaction"] > 0.85 > ends["vLLM"]
