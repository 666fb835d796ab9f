"""Doctor's rows on the release of Gaudi's software, on its torch, and on the torch that vLLM is built for."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.sim_path import TORCH, software_path
from vllm_gaudi_ucm.cli.doctor import machine
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.device import gaudi_software
from vllm_gaudi_ucm.device.gaudi_software import minor_version
from vllm_gaudi_ucm.vllm_api.versions import BUILT_FOR_TORCH, SUPPORTED_VLLM


def rows(monkeypatch: pytest.MonkeyPatch, **installed: str) -> dict[str, Check]:
    """Of an environment with these distributions."""
    given = {name.replace("_", "-"): found for name, found in installed.items()}
    for module in (machine, gaudi_software):
        monkeypatch.setattr(module, "installed_version", given.get)
    return {check.name: check for check in machine.version_checks()}


@pytest.mark.parametrize(
    ("build", "torch", "status", "words"),
    [
        ("1.24.1.482", "2.11.0a0+git1", "ok", "no vLLM is built for this torch"),
        ("1.24.2", "2.13.0", "ok", "vLLM 0.32 is built for this torch"),
        ("1.24.2", "2.11.0", "fail", "install the torch that comes with Gaudi software 1.24.2"),
        ("1.25.0.3", "2.14.0", "warn", "first-hour"),
    ],
)
def test_a_release_and_its_torch(
    build: str, torch: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows(monkeypatch, vllm="0.32.0", torch=torch, habana_torch_plugin=build)["Gaudi software"]
    assert (row.status, row.found) == (status, f"{build}, torch {torch}")
    assert words in row.advice
    assert row.expected


def test_no_row_without_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Gaudi software" not in rows(monkeypatch, vllm="0.32.0", torch="2.13.0")


def test_the_torch_that_vllm_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows(monkeypatch, vllm="0.33.0+empty", torch="2.13.0", habana_torch_plugin="1.24.2")["torch of vLLM"]
    assert row.status == "info"
    assert row.found == "vLLM 0.33.0+empty is built for torch 2.14, and runs with 2.13.0 here"
    assert "vLLM 0.32 for torch 2.13" in row.advice
    assert "torch of vLLM" not in rows(monkeypatch, vllm="0.33.0", torch="2.14.0+cpu")


def test_every_supported_vllm_has_its_torch() -> None:
    """The window's lower end, and the installed one."""
    assert SUPPORTED_VLLM.startswith(f">={next(iter(BUILT_FOR_TORCH))}.")
    assert minor_version(version("vllm")) in BUILT_FOR_TORCH


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("release", TORCH)
def test_on_the_simulated_card(release: str) -> None:
    """As the process sees it, from the card's own distribution."""
    program = "from vllm_gaudi_ucm.cli.doctor.machine import version_checks\nprint(*version_checks(), sep='\\n')"
    env = {"PYTHONPATH": software_path(release), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    (row,) = [line for line in done.stdout.splitlines() if "name='Gaudi software'" in line]
    fits = TORCH[release] == minor_version(version("torch"))
    assert f"status='{'ok' if fits else 'fail'}'" in row
    assert f"found='{release}" in row
