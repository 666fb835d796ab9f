"""`gaudi-ucm config`: the table in three forms, and the check of a file."""

import json
from pathlib import Path

import pytest

from vllm_gaudi_ucm.cli.main import main
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, describe, markdown_table

Capture = pytest.CaptureFixture[str]


def test_table(capsys: Capture) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(row.key in out for row in describe())


def test_markdown(capsys: Capture) -> None:
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == f"{markdown_table()}\n"


def test_json(capsys: Capture) -> None:
    assert main(["config", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in rows] == [row.key for row in describe()]
    assert set(rows[0]) == {"key", "type", "default", "description"}


def test_check_of_a_good_file(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("cpu: {threads: 2}\n")
    assert main(["config", "--check", str(file)]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["cpu"] == {
        "threads": 2,
        "packed_weights": True,
        "compact_weights": True,
        "matrix_unit": True,
        "native_graphs": True,
    }
    assert plain["attention"] == UcmConfig().to_dict()["attention"]
    assert main(["config", "--check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": [], "config": plain}


def test_check_of_a_bad_file(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("cpu: {thread: 2}\nphase_log: 3\n")
    assert main(["config", "--check", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "ucm.phase_log: found 3, expected path of a file or null",
        "ucm.cpu.thread: found an unknown key, expected ucm.cpu.threads (the nearest valid key)",
    ]
    assert main(["config", "--check", str(file), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2
