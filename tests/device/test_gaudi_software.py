"""Releases of Gaudi's software, the torch that each ships, and what the simulated card plays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sim_path import NEWEST, TORCH, played_release, software_path
from vllm_gaudi_ucm.device.gaudi_software import RELEASES, GaudiSoftware, minor_version


@pytest.mark.parametrize(
    ("build", "torch", "release", "fits"),
    [
        ("1.24.1.482", "2.11.0a0+git5d0b3a1", "1.24.1", True),
        ("1.24.1.482", "2.13.0", "1.24.1", False),
        ("1.24.2", "2.13.0+cpu", "1.24.2", True),
        ("1.24.2.7", "2.11.0", "1.24.2", False),
        ("1.24.2.7", None, "1.24.2", False),
        ("1.25.0.1", "2.13.0", "1.25.0", False),
    ],
)
def test_a_release_has_its_torch(build: str, torch: str | None, release: str, fits: bool) -> None:
    software = GaudiSoftware(build, torch)
    assert software.release == release
    assert software.has_its_torch is fits
    assert (software.expected_torch is None) == (release not in RELEASES)


def test_minor_versions() -> None:
    assert [minor_version(text) for text in ("2.13.0a0+git1", "0.33.0", None, "main")] == ["2.13", "0.33", None, None]


def test_the_simulated_card_plays_each_release() -> None:
    assert TORCH == RELEASES
    assert next(reversed(RELEASES)) == NEWEST
    assert [played_release(torch) for torch in ("2.11.0", "2.13.0a0+git1", "2.14.0+cpu")] == [
        "1.24.1",
        "1.24.2",
        "1.24.2",
    ]
    program = "from importlib.metadata import version; print(version('habana-torch-plugin'))"
    for release in RELEASES:
        env = {"PYTHONPATH": software_path(release)}
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
        assert found.startswith(release)
