"""`python -m tests.fuzz`: which seeds, what is printed, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.outcome import Outcome
from tests.fuzz.seeds import SeedProcesses, parse_seeds


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds(["3 7", "10..12", "7,8"]) == [3, 7, 10, 11, 12, 8]


@pytest.mark.parametrize("text", ["", "a", "3..", "5..3", "-1"])
def test_other_seeds_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="expected numbers and ranges"):
        parse_seeds([text])


def test_wrong_arguments_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x..y"]) == 2
    assert main(["1", "--pin", "drafts"]) == 2
    assert "SEEDS=x..y: expected" in capsys.readouterr().err


def outcomes(seed: int) -> Outcome:
    problems = ["r3: token 2 of 9: 7, wanted 8, 1.0000 too low"] if seed == 2 else []
    return Outcome(seed, "llama, tight", problems, steps=10, tokens=20)


def test_a_line_for_each_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(SeedProcesses, "run", lambda self, seed: outcomes(seed))
    file = tmp_path / "fuzz.json"
    assert main(["1..3", "--json", str(file), "--pin", "drafts=none"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   1: llama, tight | 10 steps")
    assert lines[1].startswith("FAIL 2")
    assert lines[2:4] == [
        "     r3: token 2 of 9: 7, wanted 8, 1.0000 too low",
        "     repeat: make fuzz SEEDS=2 ARGS='--pin drafts=none'",
    ]
    assert lines[-1].startswith("3 seeds, 1 failed, 30 steps, 60 tokens")
    assert lines[-1].endswith("failed: 2")
    assert [one["problems"] for one in json.loads(file.read_text())] == [[], outcomes(2).problems, []]
    assert main(["1", "3"]) == 0
