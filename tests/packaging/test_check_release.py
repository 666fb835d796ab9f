"""What `make release` says of a wheel without kernels, and of a bill of materials that is not the wheel's."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts.check_release import bill_faults, wheel_faults
from vllm_gaudi_ucm.ops.cpu.native.levels import LEVELS

METADATA = """Metadata-Version: 2.4
Name: vllm-gaudi-ucm
Version: 1.2.3
Requires-Dist: numpy<3,>=1.26
Requires-Dist: prometheus_client<1
Requires-Dist: redis<9,>=6; extra == "redis"
"""


def make_wheel(folder: Path, kernels: list[str]) -> Path:
    wheel = folder / "vllm_gaudi_ucm-1.2.3-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_gaudi_ucm-1.2.3.dist-info/METADATA", METADATA)
        for name in kernels:
            archive.writestr(f"vllm_gaudi_ucm/ops/cpu/native/portable/{name}", b"")
    return wheel


def make_bill(folder: Path, components: list[str], version: str | None = "1.2.3") -> Path:
    root = {"name": "vllm-gaudi-ucm"} | ({"version": version} if version else {})
    listed = [{"name": name, "version": "1"} for name in components]
    bill = folder / "bill.cdx.json"
    bill.write_text(json.dumps({"metadata": {"component": root}, "components": listed}))
    return bill


def test_a_wheel_has_the_kernels_of_every_level(tmp_path: Path) -> None:
    files = [level.file for level in LEVELS]
    assert not list(wheel_faults(make_wheel(tmp_path, files)))
    (fault,) = wheel_faults(make_wheel(tmp_path, files[:-1]))
    assert "lacks" in fault
    assert files[-1] in fault
    assert files[0] not in fault


@pytest.mark.parametrize(
    ("components", "version", "expected"),
    [
        (["numpy", "prometheus-client", "typing_extensions"], "1.2.3", []),
        (["numpy", "prometheus_client"], None, ["is about vllm-gaudi-ucm None, expected vllm-gaudi-ucm 1.2.3"]),
        (["numpy"], "1.2.3", ["lacks prometheus-client"]),
        (["numpy", "prometheus_client", "pip", "setuptools"], "1.2.3", ["lists pip, setuptools"]),
    ],
)
def test_a_bill_is_about_the_wheel_and_what_it_requires(
    tmp_path: Path, components: list[str], version: str | None, expected: list[str]
) -> None:
    wheel = make_wheel(tmp_path, [])
    found = list(bill_faults(make_bill(tmp_path, components, version), wheel))
    assert len(found) == len(expected)
    for fault, words in zip(found, expected, strict=True):
        assert words in fault
