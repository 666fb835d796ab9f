"""Phase logs of several engines, or of several runs, in each command that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import mixed_steps
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.observability.log_file import of_engine
from vllm_gaudi_ucm.observability.phase_log import PhaseLog

LIMITS = {"max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 100, "block_size": 16, "max_num_seqs": 8}
FEW = ("--max-graphs", "6")


def write(path: Path, count: int, **changes: Any) -> Path:
    log = PhaseLog(path, {"model": "models/tiny", **LIMITS, **changes}, emit=lambda text: None)
    for record in mixed_steps(count):
        log.append(record)
    log.close()
    return path


def run(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [write(of_engine(tmp_path / "phases.jsonl", engine), 40 + 20 * engine) for engine in range(2)]


def test_all_steps_count(logs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buckets, page = tmp_path / "buckets.yaml", tmp_path / "steps.html"
    assert run("phases", *logs, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100
    assert run("tune", *logs, *FEW, "--gap", 1, "-o", buckets, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100
    assert "log: phases.jsonl, phases.1.jsonl" in buckets.read_text()
    assert run("plan", "--log", *logs, "--buckets", buckets, "--json") in (0, 1)
    planned = json.loads(capsys.readouterr().out)
    assert planned["traffic"] == f"{logs[0]}, {logs[1]}"
    assert run("plot", *logs, "--buckets", buckets, "-o", page) == 0
    assert "100 steps" in page.read_text()


def test_the_last_part_of_each_is_held_out(logs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", *logs, *FEW, "--gap", 1, "--holdout", 0.5, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["steps"], value["held_out"]["steps"]) == (50, 50)


@pytest.mark.parametrize("command", ["phases A B", "tune A B", "plan --log A B", "plot A B -o steps.html"])
def test_other_limits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """With both files and both values."""
    monkeypatch.chdir(tmp_path)
    write(Path("A"), 5)
    write(Path("B"), 5, max_model_len=1024)
    assert run(*command.split()) == 2
    assert "B: max_model_len is 1024, and in A it is 512; expected logs of servers with the same limits" in (
        capsys.readouterr().err
    )


def test_a_limit_that_an_option_says_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = write(tmp_path / "a.jsonl", 30), write(tmp_path / "b.jsonl", 30, num_blocks=99)
    assert run("tune", *logs, *FEW, "--gap", 1, "--num-blocks", 100, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 60


def test_logs_that_were_joined_to_one_file(logs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    both = logs[0].with_name("both.jsonl")
    both.write_bytes(logs[0].read_bytes() + logs[1].read_bytes())
    assert run("tune", both, *FEW, "--gap", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100
