"""A process that crashes, hangs, is killed, prints without end or leaves children behind: the run goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.open_files import open_files
from vllm_gaudi_ucm_tools.first_hour import launcher
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart
from vllm_gaudi_ucm_tools.first_hour.result import Ending

LIMIT_S = 60.0
CHILD = """
import ctypes, json, os, signal, subprocess, sys, time
descriptor, request = int(sys.argv[1]), json.loads(sys.argv[2])
os.set_inheritable(descriptor, False)
def say(**values):
    os.write(descriptor, json.dumps(values).encode() + b"\\n")
say(kind="note", name="pid", value=os.getpid())
exec(request["code"])
say(kind="end", status="done", text="")
"""


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs the code of its request, in place of the one that loads torch."""
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setattr(launcher, "CHILD", "a_child")
    monkeypatch.setattr(launcher, "GRACE_S", 1.0)


def run(tmp_path: Path, code: str, limit_s: float = LIMIT_S, **more: str | None) -> Ending:
    return run_apart({"code": code}, {"PYTHONPATH": str(tmp_path), **more}, limit_s)


def test_a_good_end(tmp_path: Path) -> None:
    ending = run(tmp_path, "print('hello'); print('there', file=sys.stderr)")
    assert ending.status == 0
    assert [event["kind"] for event in ending.events] == ["note", "end"]
    assert set(ending.log.split()) == {"hello", "there"}


@pytest.mark.parametrize(
    ("code", "status"),
    [("ctypes.string_at(0)", -11), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(7)", 7), ("1 / 0", 1)],
)
def test_it_dies(tmp_path: Path, code: str, status: int) -> None:
    ending = run(tmp_path, code)
    assert ending.status == status
    assert [event["kind"] for event in ending.events] == ["note"], "what it said before stays"


def test_stacks_of_a_crash_are_in_the_log(tmp_path: Path) -> None:
    assert "Segmentation fault" in run(tmp_path, "ctypes.string_at(0)").log


@pytest.mark.parametrize("ignore", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
def test_it_hangs(tmp_path: Path, ignore: str) -> None:
    ending = run(tmp_path, f"{ignore}print('before', flush=True); time.sleep(600)", limit_s=4)
    assert ending.status is None
    assert ending.log == "before"
    assert not psutil.pid_exists(ending.events[0]["value"])


def test_its_children_end_with_it(tmp_path: Path) -> None:
    code = "other = subprocess.Popen(['sleep', '600']); say(kind='note', name='child', value=other.pid)"
    ending = run(tmp_path, code)
    assert ending.status == 0
    other = ending.events[1]["value"]
    deadline = time.monotonic() + 60
    while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a child of a probe is still there"
        time.sleep(0.05)


def test_endless_output_is_bounded(tmp_path: Path) -> None:
    ending = run(tmp_path, "[print(i, 'x' * 100_000 if i % 1000 == 0 else '') for i in range(3000)]")
    lines = ending.log.splitlines()
    assert len(lines) == launcher.LOG_LINES
    assert lines[-1].startswith("2999")
    assert len(run(tmp_path, "print('x' * 100_000)").log) == launcher.LONGEST_LINE


def test_an_unfinished_line_is_no_event(tmp_path: Path) -> None:
    ending = run(tmp_path, """os.write(descriptor, b'{"kind": "cl'); os._exit(0)""")
    assert [event["kind"] for event in ending.events] == ["note"]


def test_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    show = "print(os.environ.get('PT_HPU_LAZY_MODE'), os.environ.get('A_VARIABLE'))"
    assert run(tmp_path, show, PT_HPU_LAZY_MODE=None, A_VARIABLE="2").log == "None 2"
    assert run(tmp_path, show).log == "1 None"


def test_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(launcher.subprocess, "Popen", refuse)
    ending = run(tmp_path, "")
    assert ending.status == 1
    assert "Cannot allocate memory" in ending.log
    assert not open_files(tmp_path)


def test_a_probe_does_not_outlive_the_command(tmp_path: Path) -> None:
    """Whatever ends the command, SIGKILL too: a probe that is left behind would hold the card."""
    code = """
import subprocess, sys, time
code = "import os, sys, time; from vllm_gaudi_ucm_tools.first_hour.child import die_with; die_with(int(sys.argv[1])); "
code += "print('ready', flush=True); time.sleep(600)"
import os
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive
