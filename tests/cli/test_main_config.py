"""`gaudi-ucm config`: the table in three forms, and the check of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.cli.doctor import doctor
from vllm_gaudi_ucm.cli.doctor.check import Check, guarded
from vllm_gaudi_ucm.cli.main import main
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, describe, markdown_table

Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=["80", "200"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Width of the terminal, and of lines: those of 100 columns are read with ease."""
    monkeypatch.setenv("COLUMNS", request.param)
    return min(int(request.param), 100)


def test_overview(capsys: Capture, columns: int) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 4 * len(describe())
    assert max(map(len, lines)) <= columns
    section = ""
    options = []
    for line in lines:
        words = line.split()
        if line.startswith("ucm"):
            section = words[0].rstrip(":")
        elif line[:2] == "  " and line[2:3].strip():
            options.append((f"{section}.{words[0]}", line))
    shown = dict(options)
    assert sorted(shown) == sorted(row.key for row in describe())
    for row in describe():
        line = shown[row.key]
        assert line.split()[1] == row.default.split()[0]
        assert row.description.split()[0].rstrip(".") in line, "a description begins on the line of its key"


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("graphs", "ucm.graphs"),
        ("ucm.graphs", "ucm.graphs"),
        ("GSA", "ucm.ucm_sparse_config.GSA"),
        ("gsa", "ucm.ucm_sparse_config.GSA"),
        ("graphs.max_graphs", "ucm.graphs.max_graphs"),
        ("all", "ucm"),
    ],
)
def test_section(capsys: Capture, columns: int, asked: str, key: str) -> None:
    assert main(["config", asked]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    for row in describe():
        is_asked = f"{row.key}.".startswith(f"{key}.")
        assert (f"\n{row.key} = {row.default}\n" in out) is is_asked
        if is_asked:
            assert " ".join(f"{row.type} {row.description}".split()) in words
    assert main(["config", asked, "--json"]) == 0
    assert all(f"{row['key']}.".startswith(f"{key}.") for row in json.loads(capsys.readouterr().out))


def test_unknown_section(capsys: Capture) -> None:
    assert main(["config", "grahps"]) == 2
    error = capsys.readouterr().err
    assert "SECTION grahps: found an unknown key, expected graphs (the nearest valid key)" in error
    assert main(["config", "graphs", "--check", "ucm.yaml"]) == 2
    assert "--check ucm.yaml" in capsys.readouterr().err


def test_defaults_are_written_as_in_a_file() -> None:
    defaults = {row.key: row.default for row in describe()}
    assert defaults["ucm.graphs.skip_guards"] == "true"
    assert defaults["ucm.ucm_sparse_config.GSA.reuse_steps"] == "1"
    assert defaults["ucm.ucm_sparse_config.GSA.dense_layers"] == "[]"
    assert defaults["ucm.phase_log"] == "null"


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


BAD_PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "phase log": ({"phase_log": "{here}/none/phases.jsonl"}, "ucm.phase_log: {here}/none/phases.jsonl: the folder"),
    "phase log a folder": ({"phase_log": "{here}"}, "ucm.phase_log: {here}: is a folder"),
    "phase log below a file": ({"phase_log": "{here}/file/x"}, "ucm.phase_log: {here}/file/x: {here}/file is a file"),
    "buckets missing": ({"graphs": {"buckets": "{here}/none.yaml"}}, "ucm.graphs.buckets: {here}/none.yaml: cannot"),
    "buckets another file": (
        {"graphs": {"buckets": "{here}/file"}},
        "ucm.graphs.buckets: {here}/file: found schema 'str'",
    ),
    "trace missing": ({"graphs": {"trace": "{here}/none.jsonl"}}, "ucm.graphs.trace: {here}/none.jsonl: cannot"),
    "trace another file": ({"graphs": {"trace": "{here}/file"}}, "ucm.graphs.trace: {here}/file:1: found 'some text'"),
    "strategy without its file": ({"graphs": {"strategy": "file"}}, "ucm.graphs.strategy"),
    "recipes below a file": (
        {"graphs": {"mode": "compile", "recipe_cache": "{here}/file/x"}},
        "ucm.graphs.recipe_cache: cannot use {here}/file/x: {here}/file is no folder",
    ),
    "recipes of nothing": ({"graphs": {"recipe_cache": "{here}"}}, "ucm.graphs.recipe_cache: found {here}, but on"),
    "store below a file": (
        {
            "ucm_sparse_method": "GSA",
            "memory_mode": {"enabled": True, "store": {"kind": "file", "path": "{here}/file/x"}},
        },
        "store.path: found {here}/file/x (Not a directory)",
    ),
}


@pytest.mark.parametrize("case", BAD_PLACES)
def test_check_finds_what_the_doctor_finds(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Files, folders and stores that the options name, here and now."""
    config, message = BAD_PLACES[case]
    (tmp_path / "file").write_text("some text\n")
    file = tmp_path / "ucm.json"
    file.write_text(json.dumps(config).replace("{here}", str(tmp_path)))
    monkeypatch.setattr("vllm_gaudi_ucm.device.detect.detect_device", lambda: "cpu")
    before = sorted(tmp_path.iterdir())
    assert main(["config", "--check", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message.replace("{here}", str(tmp_path)) in captured.err
    assert len(captured.err.splitlines()) == 1
    assert main(["config", "--check", str(file), "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert (plain["ok"], plain["problems"]) == (False, captured.err.splitlines())
    assert sorted(tmp_path.iterdir()) == before
    failed = [check for check in of_config(file) if check.status == "fail"]
    assert [check.found in captured.err for check in failed] == [True]


def of_config(file: Path) -> list[Check]:
    """The doctor's rows, without the child processes that ask vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "PluginChecks", lambda: pytest.fail("not looked at here"))
        patch.setattr(doctor, "guarded", lambda name, rows: [] if name == "platform plugin" else guarded(name, rows))
        patch.setattr(doctor, "detect_device", lambda: "cpu")
        return doctor.examine(str(file)).checks


@pytest.mark.parametrize("number", [".inf", ".nan"])
def test_check_never_prints_what_is_no_json(tmp_path: Path, capsys: Capture, number: str) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(f"graphs: {{memory_budget: {number}}}\n")
    for arguments in ((), ("--json",)):
        assert main(["config", "--check", str(file), *arguments]) == 1
        captured = capsys.readouterr()
        assert "Infinity" not in captured.out
        assert "NaN" not in captured.out
        assert "ucm.graphs.memory_budget: found" in captured.out + captured.err


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
