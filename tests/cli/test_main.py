"""`gaudi-ucm`: commands are loaded lazily, and every end has its exit code."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm import __version__
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.vllm_api import versions


def command(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], int]) -> None:
    """Puts a command `probe` with one option in place."""
    module = types.ModuleType("a_command")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("a_command", "a command of the test"))


def test_command_gets_its_options_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, lambda args: args.size)
    assert cli.main(["probe", "--size", "7"]) == 7
    assert cli.main(["--traceback", "probe"]) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ucm.cpu.threads: found 0\n  expected more"),
        FileNotFoundError(2, "No such file", "a.jsonl"),
        versions.UnsupportedVersionError("vllm 0.31"),
    ],
)
def test_expected_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(args: Any) -> int:
        raise error

    command(monkeypatch, fail)
    assert cli.main(["probe"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"gaudi-ucm: error: {' '.join(str(error).split())}\n"
    with pytest.raises(type(error)):
        cli.main(["--traceback", "probe"])


def test_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    command(monkeypatch, interrupted)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (None, "the module absent_command is not part of this installation"),
        ("import absent_package", "the Python package absent_package is missing; pip install 'vllm-gaudi-ucm[tools]'"),
    ],
)
def test_missing_module(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str | None,
    advice: str,
) -> None:
    if source is not None:
        (tmp_path / "absent_command.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("absent_command", "a command of the test"))
    assert cli.main(["probe"]) == 2
    assert f"gaudi-ucm: error: command probe: {advice}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["config", "--nonsense"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: gaudi-ucm" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"vllm-gaudi-ucm {__version__}\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help_text = capsys.readouterr().out
    assert all(name in help_text for name in cli.commands())


@pytest.mark.parametrize("name", list(cli.commands()))
def test_every_command_is_installed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: gaudi-ucm {name}" in capsys.readouterr().out


# Each takes a second of CPU and more to import.
HEAVY = ("torch", "vllm", "transformers", "triton", "matplotlib", "scipy", "redis")


def test_help_imports_nothing_heavy() -> None:
    """A count of modules, where seconds would depend on the machine; one process for all, for the same reason."""
    code = f"""
import contextlib, io, sys
from vllm_gaudi_ucm.cli.main import commands, main
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in commands())):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
    print(*arguments, *(name for name in {HEAVY} if name in sys.modules), sep=",")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    expected = ["--help", "--version", *(f"{name},--help" for name in cli.commands())]
    assert done.stdout.splitlines() == expected


def test_help_keeps_names(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["op-cost", "--help"], "Count what attention's operators cost on Gaudi, modelled."),
        (["store", "--help"], "Count, verify or clear stored KV blocks, or model a store for logged traffic."),
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", ["config", "config --markdown", "--help", "plan --help", "phases {log}"])
def test_a_closed_pipe_is_silent(arguments: str, tmp_path: Path) -> None:
    """`gaudi-ucm ... | head -0`."""
    write_log(tmp_path / "phases.jsonl", mixed_steps(50))
    words = arguments.format(log=tmp_path / "phases.jsonl")
    command = f"{sys.executable} -m vllm_gaudi_ucm.cli.main {words} | (exec <&-; sleep 0.1); echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "config", "--markdown"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "gaudi-ucm: error: [Errno 28] No space left on device\n"


def test_console_script_and_module() -> None:
    script = Path(sys.executable).with_name("gaudi-ucm")
    for start in ([str(script)], [sys.executable, "-m", "vllm_gaudi_ucm.cli.main"]):
        done = subprocess.run([*start, "config", "--check", "/none.yaml"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "cannot be read (No such file or directory)" in done.stderr
