"""Files that commands write: their place is checked before the work, and an interruption leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning
from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.observability.phase_log import PhaseLog, read_phase_log
from vllm_gaudi_ucm_tools.output import check_output, report_console, written_whole
from vllm_gaudi_ucm_tools.traffic.simulation import Simulation

# With input that does not exist: who looks at it first has begun to work.
COMMANDS: dict[str, list[str]] = {
    "trace": ["trace", "--mix", "chat", "--steps", "1000000000", "-o"],
    "tune": ["tune", "none.jsonl", "-o"],
    "plot": ["plot", "none.jsonl", "-o"],
    "phases": ["phases", "none.jsonl", "--plot"],
    "op-cost": ["op-cost", "--log", "none.jsonl", "--plot"],
    "demo": ["demo", "--model", "none", "--plot"],
    "demo --phase-log": ["demo", "--model", "none", "--phase-log"],
    "sparse-report": ["sparse-report", "none", "none.txt", "-o"],
    "calibrate": ["calibrate", "none", "--prompts", "none", "-o", "x", "--json"],
    "sparse-report --json": ["sparse-report", "none", "none.txt", "--json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_place_is_checked_before_the_work(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    (tmp_path / "file").write_text("kept")
    for place, why in (("none/x.png", "none does not exist"), ("file/x.png", "file is a file"), ("", "is a folder")):
        (tmp_path / "dir.png").mkdir(exist_ok=True)
        path = tmp_path / (place or "dir.png")
        if not place and name == "sparse-report":
            path = tmp_path / "dir"  # a prefix: dir.png
        assert cli.main([*command, str(path)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert command[-1] in error or "--output" in error
        assert why in error
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dir.png", "file"]


def test_an_interrupted_trace_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Simulation.steps

    def interrupted(self: Simulation, count: int) -> Iterator[Any]:
        yield from whole(self, 20)
        raise KeyboardInterrupt

    log = tmp_path / "phases.jsonl"
    trace = ["trace", "--mix", "chat", "--steps", "40", "-o", str(log)]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "steps", interrupted)
        assert cli.main(trace) == 130
        assert list(tmp_path.iterdir()) == []
        write_log(log, mixed_steps(3))
        assert cli.main(trace) == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["phases.jsonl"]
    assert len(read_phase_log(log)[1]) == 3
    # the log of the run before is kept, as a server keeps it
    assert cli.main(trace) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["phases.jsonl", "phases.jsonl.previous"]
    assert (len(read_phase_log(log)[1]), len(read_phase_log(tmp_path / "phases.jsonl.previous")[1])) == (40, 3)


def test_ctrl_c(tmp_path: Path) -> None:
    """The signal itself."""
    command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "trace", "--mix", "chat", "--steps", "100000000"]
    child = subprocess.Popen(
        [*command, "-o", str(tmp_path / "phases.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.iterdir())
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first line, and later, where a server would go on without its log."""
    monkeypatch.setattr(PhaseLog, "is_open", False)
    assert cli.main(["trace", "--mix", "chat", "--steps", "40", "-o", str(tmp_path / "phases.jsonl")]) == 2
    assert f"--output {tmp_path}/phases.jsonl: could not be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["trace", "--mix", "chat", "--steps", "40", "-o", "/dev/full"]) == 2
    assert "--output /dev/full: " in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    with written_whole(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
    link, target = tmp_path / "link.txt", tmp_path / "target.txt"
    link.symlink_to(target)
    with written_whole(link) as path:
        path.write_text("x")
    assert link.is_symlink()
    assert target.read_text() == "x"
    half = written_whole(target)
    half.__enter__().write_text("half")
    assert not half.__exit__(RuntimeError, RuntimeError(), None)
    assert target.read_text() == "x"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.txt", "target.txt"]


def test_names(tmp_path: Path) -> None:
    check_output("-o", None, (".png",))
    check_output("-o", tmp_path / "x.PNG", (".png",))
    check_output("-o", Path("x.png"))
    with pytest.raises(ValueError, match=r"^-o .*x\.gif: expected a name that ends in \.png, \.svg"):
        check_output("-o", tmp_path / "x.gif", (".png", ".svg"))


@pytest.mark.parametrize("columns", ["40", "80"])
def test_tables_in_a_pipe_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """Whatever the terminal's width, which COLUMNS stands for."""
    monkeypatch.setenv("COLUMNS", columns)
    log = tmp_path / "trace.jsonl"
    for command in (
        ["trace", "--mix", "chat", "--steps", "30", "-o", str(log)],
        ["phases", str(log)],
        ["op-cost", "--batch", "decode"],
        ["plan", "--max-graphs", "4"],
    ):
        assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert "\u2026" not in out, command
        assert max(len(line) for line in out.splitlines()) > 60


def test_tables_of_benchmarks_in_a_pipe_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert planning.main(["--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    heading = next(line for line in out.splitlines() if "requests" in line)
    assert heading.rstrip().endswith("goal, ms")


def test_a_report_is_as_wide_as_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert report_console().width == 80
    assert report_console(least_width=120).width == 120
