"""Files of a phase log: which are kept, how many, and how long they get."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.observability.records import HEADER, mixed_steps, step, write_log
from vllm_gaudi_ucm.observability.log_file import keep_previous
from vllm_gaudi_ucm.observability.phase_log import PhaseLog, read_phase_log


def steps_of(path: Path) -> list[int]:
    return [record.step for record in read_phase_log(path)[1]]


def test_starts_that_failed_displace_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(3))
    for _ in range(4):
        PhaseLog(path, HEADER).close()
    assert steps_of(path) == []
    assert steps_of(tmp_path / "phases.jsonl.previous") == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("behind", ["", '{"step":1,', "\n"])
def test_what_holds_no_step_is_not_kept(tmp_path: Path, behind: str) -> None:
    """A header, with a line torn by a kill. Another file is kept, whatever it is."""
    path = tmp_path / "phases.jsonl"
    write_log(path, [])
    path.write_text(path.read_text().rstrip("\n") + ("\n" + behind if behind.strip() else behind))
    keep_previous(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["phases.jsonl"]
    path.write_text("mine")
    keep_previous(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["phases.jsonl.previous"]


def test_generations_are_kept(tmp_path: Path) -> None:
    """The oldest one goes first."""
    path = tmp_path / "phases.jsonl"
    for number in range(6):
        log = PhaseLog(path, HEADER, generations=3)
        log.append(step(number))
        log.close()
    names = ["", ".previous", ".previous.2", ".previous.3"]
    assert [steps_of(tmp_path / f"phases.jsonl{name}") for name in names] == [[5], [4], [3], [2]]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_generation_that_someone_took_away_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    for number in range(4):
        write_log(path, [step(number)])
    (tmp_path / "phases.jsonl.previous.2").unlink()
    write_log(path, [step(4)])
    names = ["", ".previous", ".previous.2", ".previous.3"]
    assert [steps_of(tmp_path / f"phases.jsonl{name}") for name in names] == [[4], [3], [2], [0]]


def test_a_long_log_goes_on_in_another_file(tmp_path: Path) -> None:
    """Each has the header, and together they hold the newest steps."""
    path = tmp_path / "phases.jsonl"
    log = PhaseLog(path, HEADER, emit=lambda text: None, most_bytes=4000, generations=2)
    for number in range(200):
        log.append(step(number))
    log.close()
    files = [tmp_path / f"phases.jsonl{name}" for name in (".previous.2", ".previous", "")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(4000 <= file.stat().st_size < 4500 for file in files[:2])
    assert files[2].stat().st_size < 4500
    held = [number for file in files for number in steps_of(file)]
    assert held == list(range(held[0], 200))
    assert held[0] > 100
    assert {json.dumps(read_phase_log(file)[0]) for file in files} == {json.dumps(read_phase_log(path)[0])}
    assert log.summary.steps == 200


def test_the_time_of_a_step(tmp_path: Path) -> None:
    """In seconds since 1970, to a millisecond; a step that was only modelled has none."""
    path = tmp_path / "phases.jsonl"
    write_log(path, [step(0), replace(step(1), time=1764279000.1234)])
    assert [record.time for record in read_phase_log(path)[1]] == [0.0, 1764279000.123]
    _, modelled, line = map(json.loads, path.read_text().splitlines())
    assert list(line)[:3] == ["step", "time", "bucket"]
    assert "time" not in modelled
