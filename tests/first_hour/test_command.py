"""`gaudi-ucm first-hour` as a person runs it: on the CPU and on the simulated card, to its end or until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.first_hour.hours import ON_CARD, ON_CPU, ROOT, first_hour
from vllm_gaudi_ucm.device.gaudi_software import RELEASES, minor_version
from vllm_gaudi_ucm_tools.first_hour.outputs import ARCHIVE, JSON, PAGE

PLANTED_USER = "xavier_doe"
SECRET = "hunter2hunter2hunter2"
PLANTED = ROOT / "tests/first_hour/planted"


def test_on_a_cpu(tmp_path: Path) -> None:
    """Probes that apply, one that does not; every file, with a plot; nothing that tells whose machine it is."""
    private = {"HF_TOKEN": SECRET, "LOGNAME": PLANTED_USER, "HOME": str(tmp_path), "PT_HPU_NOTE": f"{tmp_path}/x"}
    run = first_hour(tmp_path, {**ON_CPU, **private}, "--only", "4,19,23", "--modes", "eager")
    assert run.status == 0, run.errors
    assert run.verdicts() == {"4": "does not apply here", "19 eager": "as expected", "23 eager": "as expected"}
    assert run.report["machine"]["torch"]
    assert run.report["machine"]["device"] == "cpu"
    assert {path.name for path in run.output.iterdir()} == {JSON, PAGE, ARCHIVE}
    page = (run.output / PAGE).read_text()
    assert page.count("<svg") == 1
    assert all(verdict in page for verdict in run.verdicts().values())
    with tarfile.open(run.output / ARCHIVE) as tar:
        files = [tar.extractfile(name) for name in tar.getnames()]
        whole = b"".join(file.read() for file in files if file is not None)
    assert b"PT_HPU_NOTE" in whole
    for value in (SECRET, PLANTED_USER, str(tmp_path), str(ROOT)):
        assert value.encode() not in whole


@pytest.mark.slow
def test_a_part_of_each_kind_on_the_simulated_card(tmp_path: Path) -> None:
    """All modes, a probe that serves; the page, and the archive with the trace."""
    path = f"{PLANTED}:{ROOT}:{ON_CARD['PYTHONPATH']}"
    env = {**ON_CARD, "PYTHONPATH": path, "PLANTED_FAULT": "few_graphs"}
    run = first_hour(tmp_path, env, "--only", "1,12,29")
    assert run.status == 0, run.errors
    found = run.verdicts()
    assert found == {
        # the software has one release of torch, the environment may have another
        "1 stock": "answered" if minor_version(version("torch")) in RELEASES.values() else "differs",
        "1 lazy": "as expected",
        "12 eager": "as expected",
        "12 compile": "answered",
        "12 lazy": "as expected",
        "29 compile": "answered",
    }
    assert run.report["machine"]["flavour"] == "upstream"
    assert "lazy mode needs the vendor's fork" in run.result("1 lazy")["found"]
    page = (run.output / PAGE).read_text()
    assert all(verdict in page for verdict in set(found.values()))
    with tarfile.open(run.output / ARCHIVE) as tar:
        files = {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name)) is not None}
        assert any(name.endswith("trace.json") and b"traceEvents" in file for name, file in files.items())
        assert not any(str(ROOT).encode() in file for file in files.values())


def test_it_runs_to_its_end_whatever_fails(tmp_path: Path) -> None:
    """No bridge, no room for a probe to answer: rows, files, and status 0."""
    run = first_hour(
        tmp_path, {"VLLM_GAUDI_UCM_DEVICE": "hpu", "PYTHONPATH": str(ROOT)}, "--only", "1", "--modes", "stock"
    )
    assert run.status == 0
    assert run.verdicts() == {"1 stock": "failed"}
    assert "bridge cannot be imported" in run.report["machine"]["device name"]
    assert run.report["machine"]["packages"]["vllm"]
    timed_out = first_hour(tmp_path, ON_CPU, "--only", "19", "--time-limit", "0.2")
    assert timed_out.verdicts() == {"19 eager": "timed out"}
    assert timed_out.status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_what_ran(tmp_path: Path, number: signal.Signals) -> None:
    env = {
        **os.environ,
        **ON_CPU,
        "PYTHONPATH": f"{PLANTED}:{ROOT}:{ROOT / 'tests/children'}",
        "PLANTED_FAULT": "hang_in_probes",
    }
    command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "first-hour", "--only", "4,19,23", "--output", "report"]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=errors, stderr=errors)
        deadline = time.monotonic() + 200
        while "4: does not apply here" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        time.sleep(1)  # into the probe that hangs
        process.send_signal(number)
        assert process.wait(60) == 130, log.read_text()
    report = json.loads((tmp_path / "report" / JSON).read_text())
    assert report["interrupted"] is True
    assert [(one["number"], one["verdict"]) for one in report["results"]] == [
        (4, "does not apply here"),
        (19, "interrupted"),
    ]
    assert (tmp_path / "report" / ARCHIVE).is_file()
