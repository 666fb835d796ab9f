"""`gaudi-ucm phases` on a made-up log: the table, the JSON object, the picture, and its errors."""

from __future__ import annotations

import argparse
import builtins
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm_tools.phases import phases


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(200))
    return path


def run(*argv: str | Path) -> int:
    parser = argparse.ArgumentParser()
    phases.add_arguments(parser)
    return phases.run(parser.parse_args([str(arg) for arg in argv]))


def test_table_and_histogram(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(log) == 0
    out = capsys.readouterr().out
    assert "models/tiny" in out
    assert "█" in out
    for phase in ("--u", "-su", "c-u", "csu", "c--"):
        assert sum(line.strip().startswith(phase) for line in out.splitlines()) == 2
    assert "causal 60.0%, shared 30.0%, unique 10.0%" in out


def test_json_is_one_object(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(log, "--json") == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert value["steps"] == 200
    assert value["header"]["block_size"] == 16
    assert captured.err == ""


def test_the_picture_is_a_png_with_something_on_it(log: Path, tmp_path: Path) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "phases.png"
    assert run(log, "--plot", picture) == 0
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 600
    pixels = matplotlib_image.imread(picture)[..., :3].reshape(-1, 3)
    coloured = (pixels.max(axis=1) - pixels.min(axis=1)) > 0.3
    assert coloured.mean() > 0.1


def test_a_log_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [])
    assert run(path, "--plot", tmp_path / "empty.png") == 0
    assert "no steps yet" in capsys.readouterr().out


def test_without_matplotlib_the_extra_is_named(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert run(log, "--plot", tmp_path / "x.png") == 2
    assert "pip install 'vllm-gaudi-ucm[tools]'" in capsys.readouterr().err


@pytest.mark.parametrize("plot", ["x.foo", "no/folder/x.png"])
def test_an_unusable_picture_path_is_one_line(
    log: Path, tmp_path: Path, plot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(log, "--plot", tmp_path / plot) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_log_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("hello\n")
    assert run(other) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gaudi-ucm phases: ")
    assert captured.err.count("\n") == 1
