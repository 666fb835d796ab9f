"""Several logs as one: engines of a server, or its runs, with the same limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import HEADER, mixed_steps
from vllm_gaudi_ucm.observability.phase_log import PhaseLog, PhaseLogError, PhaseLogReader, read_phase_log
from vllm_gaudi_ucm_tools.phases.joined_logs import JoinedLogs


def log(path: Path, first: int, count: int, **changes: Any) -> Path:
    written = PhaseLog(path, {**HEADER, **changes}, emit=lambda text: None)
    for record in mixed_steps(first + count)[first:]:
        written.append(record)
    written.close()
    return path


def test_steps_of_all_of_them(tmp_path: Path) -> None:
    """Whatever else their headers say."""
    paths = [log(tmp_path / "a.jsonl", 0, 5, started="now"), log(tmp_path / "a.1.jsonl", 5, 3, started="later")]
    done: list[float] = []
    with JoinedLogs(paths, done.append) as logs:
        assert [record.step for record in logs.steps()] == list(range(8))
        assert logs.header["started"] == "now"
        assert logs.name == f"{paths[0]}, {paths[1]}"
    assert done == sorted(done)
    assert done[-1] == 1.0


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 16), ("block_size", 32), ("strip", 8)])
def test_other_limits_are_named(tmp_path: Path, name: str, value: int) -> None:
    paths = [log(tmp_path / "a.jsonl", 0, 2), log(tmp_path / "b.jsonl", 0, 2, **{name: value})]
    says = f"{paths[1]}: {name} is {value}, and in {paths[0]} it is {HEADER.get(name, 0)}; expected logs of servers"
    with pytest.raises(PhaseLogError, match=re.escape(says)):
        JoinedLogs(paths)
    with JoinedLogs(paths, given=[name]) as logs:
        assert len(list(logs.steps())) == 4


def test_a_log_that_is_given_twice(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", 0, 2)
    with pytest.raises(PhaseLogError, match=r"a\.jsonl: given twice, expected each log once"):
        JoinedLogs([path, path])


def test_logs_in_one_file(tmp_path: Path) -> None:
    """Of engines with the same limits, joined by `cat`; a field that says what it does without is none."""
    first, second = log(tmp_path / "a.jsonl", 0, 3), log(tmp_path / "b.jsonl", 3, 4, max_selected_blocks=0)
    both = tmp_path / "both.jsonl"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert [record.step for record in read_phase_log(both)[1]] == list(range(7))
    with PhaseLogReader(both) as joined:
        assert joined.count() == 7


def test_a_log_of_other_limits_within_a_file(tmp_path: Path) -> None:
    first, second = log(tmp_path / "a.jsonl", 0, 3), log(tmp_path / "b.jsonl", 0, 3, num_blocks=9)
    both = tmp_path / "both.jsonl"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    says = "both.jsonl:5: another log begins here, with num_blocks 9, where the first one has None; expected logs of"
    with pytest.raises(PhaseLogError, match=re.escape(says)):
        read_phase_log(both)
    with PhaseLogReader(both, given=["num_blocks"]) as joined:
        assert len(list(joined.steps())) == 6


def test_a_log_of_another_schema_within_a_file(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", 0, 1)
    path.write_text(path.read_text() + json.dumps({"schema": "gaudi-ucm.phase-log/2"}) + "\n")
    with pytest.raises(PhaseLogError, match=r"a\.jsonl:3: found 'gaudi-ucm\.phase-log/2' where a phase log says"):
        read_phase_log(path)


def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    path, other = log(tmp_path / "a.jsonl", 0, 1), tmp_path / "b.jsonl"
    other.write_text("mine\n")
    with pytest.raises(PhaseLogError, match=r"b\.jsonl:1: found 'mine'"):
        JoinedLogs([path, other])
