"""`gaudi-ucm doctor` as a person runs it: whole processes, their JSON and exit codes.

covers: D10 (two active plugins, and what register() raises, are shown with the reason).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm_process import WarmProcess
from vllm_gaudi_ucm import PLATFORM_CLASS
from vllm_gaudi_ucm.cli import main

pytestmark = pytest.mark.slow  # starts processes

COLUMNS = {"section", "name", "status", "found", "expected", "advice"}


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The given variables, and no other of vLLM's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | variables


def checked(code: int, printed: str, errors: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a doctor."""
    assert "Traceback" not in errors
    report = json.loads(printed)
    assert report["schema"] == 1
    assert report["ok"] is (code == 0)
    assert all(set(check) == COLUMNS for check in report["checks"])
    return code, report


def diagnose(printed: str, options: tuple[str, ...]) -> None:
    """What the command line does, in a process that has imported what it needs. printed: a file for stdout."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
    sys.exit(main.main(["doctor", "--json", *options]))


def doctor(folder: Path, *options: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """A doctor under the given variables."""
    printed, log = folder / "printed.json", folder / "log.txt"
    process = WarmProcess(diagnose, (str(printed), options), log=log, env=environment(variables), cwd=folder)
    return checked(process.finish(120), printed.read_text(), log.read_text())


def row(report: dict[str, Any], name: str) -> dict[str, str]:
    """The one row with that name."""
    (found,) = [check for check in report["checks"] if check["name"] == name]
    return dict(found)


def plugin(folder: Path, name: str, source: str) -> None:
    """A distribution `rival-<name>` that offers a platform plugin, importable from the folder."""
    (folder / f"rival_{name}.py").write_text(source)
    info = folder / f"rival_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rival-{name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{name} = rival_{name}:register\n")


def rivals(folder: Path) -> None:
    """One active plugin, one that raises, one that kills its process, one that does not apply, one that prints."""
    plugin(folder, "active", "def register():\n    print('hello from a plugin')\n    return 'rival_active.Platform'\n")
    plugin(folder, "raises", "def register():\n    raise OSError('no driver')\n")
    plugin(folder, "dies", "import os\ndef register():\n    os._exit(3)\n")
    plugin(folder, "absent", "def register():\n    return None\n")


def test_healthy_machine() -> None:
    """By its own command line."""
    command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.main", "doctor", "--json"]
    variables = environment({"VLLM_GAUDI_UCM_DEVICE": "auto"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    code, report = checked(done.returncode, done.stdout, done.stderr)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert failed == []
    assert code == 0
    assert report["device"] == "cpu"
    assert row(report, "platform of vLLM")["found"] == PLATFORM_CLASS
    assert "vLLM has no platform of its own: cpu" in row(report, "register()")["found"]
    assert report["config"]["attention"]["causal_slice"] == 512
    names = {check["name"] for check in report["checks"]}
    assert {"Python", "vllm", "torch", "transformers", "triton", "memory", "cores", "threads"} <= names
    assert row(report, "ucm.ucm_sparse_method")["section"] == "sparse"


def test_unknown_device(tmp_path: Path) -> None:
    code, report = doctor(tmp_path, VLLM_GAUDI_UCM_DEVICE="bogus")
    assert code == 1
    assert report["device"] is None
    assert "found 'bogus', expected one of auto, hpu, cuda, cpu" in row(report, "register()")["found"]
    assert row(report, "VLLM_GAUDI_UCM_DEVICE")["status"] == "fail"


def test_hpu_without_its_software(tmp_path: Path) -> None:
    config = tmp_path / "ucm.yaml"
    config.write_text("cpu: {threads: 0}\n")
    code, report = doctor(tmp_path, "--config", str(config), VLLM_GAUDI_UCM_DEVICE="hpu")
    assert code == 1
    register = row(report, "register()")
    assert register["status"] == "fail"
    assert "habana_frameworks.torch (habana-torch-plugin) is missing" in register["found"]
    assert row(report, "platform of vLLM")["status"] == "fail"
    threads = row(report, "ucm.cpu.threads")
    assert (threads["found"], threads["expected"]) == ("0", "integer, at least 1 or null")
    assert report["config"] is None


def test_rival_plugins(tmp_path: Path) -> None:
    rivals(tmp_path)
    code, report = doctor(tmp_path, VLLM_GAUDI_UCM_DEVICE="cpu", PYTHONPATH=str(tmp_path))
    assert code == 1
    competition = row(report, "active plugins")
    assert (competition["status"], competition["found"]) == ("fail", "gaudi_ucm, active")
    assert "uninstall active, or set VLLM_PLUGINS=gaudi_ucm" in competition["advice"]
    assert row(report, "other plugin active of rival-active 1.2")["found"] == "active: rival_active.Platform"
    assert row(report, "other plugin raises of rival-raises 1.2")["found"] == "OSError: no driver"
    assert "ended with code 3" in row(report, "other plugin dies of rival-dies 1.2")["found"]
    assert row(report, "other plugin absent of rival-absent 1.2")["found"] == "not active"
    assert row(report, "platform of vLLM")["status"] == "fail"


def test_rival_left_out_by_vllms_filter(tmp_path: Path) -> None:
    rivals(tmp_path)
    code, report = doctor(tmp_path, VLLM_GAUDI_UCM_DEVICE="cpu", PYTHONPATH=str(tmp_path), VLLM_PLUGINS="gaudi_ucm")
    assert row(report, "active plugins")["found"] == "gaudi_ucm"
    assert row(report, "other plugin active of rival-active 1.2")["found"] == "left out by VLLM_PLUGINS"
    assert row(report, "platform of vLLM")["found"] == PLATFORM_CLASS
    assert code == 0


def test_plugin_left_out_by_vllms_filter(tmp_path: Path) -> None:
    code, report = doctor(tmp_path, VLLM_GAUDI_UCM_DEVICE="cpu", VLLM_PLUGINS="other")
    assert code == 1
    allowed = row(report, "VLLM_PLUGINS")
    assert (allowed["status"], allowed["found"]) == ("fail", "'other'")
    assert allowed["advice"] == "add gaudi_ucm to VLLM_PLUGINS, or unset it"
    assert row(report, "platform of vLLM")["status"] == "fail"


def test_vllm_told_to_take_its_own_cpu_platform(tmp_path: Path) -> None:
    code, report = doctor(tmp_path, VLLM_GAUDI_UCM_DEVICE="cpu", VLLM_TARGET_DEVICE="cpu")
    assert code == 1
    assert "unset VLLM_TARGET_DEVICE" in row(report, "platform of vLLM")["advice"]
