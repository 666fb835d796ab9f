"""What is one device's is in folders named after it, and nothing else needs them to be imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, imported, module_of, sources

DEVICES = ("cpu", "cuda", "hpu")
PREFIXES = ("cpu_", "cuda_", "hpu_", "gaudi_")


def device_of(module: str) -> str | None:
    """The device whose folder a module is in; room `device` is a choice among all of them."""
    room, *folders = module.split(".")[1:-1] or [""]
    return None if room == "device" else next((name for name in folders if name in DEVICES), None)


def device_files() -> Iterator[tuple[str | None, Path]]:
    """Every file, and the device whose folder it is in."""
    for _, file in sources():
        yield device_of(module_of(file)), file


def devices_in(names: frozenset[str]) -> set[str]:
    """The devices whose folders these imports need."""
    ours = (name for name in names if name.startswith(f"{PACKAGE}."))
    return {device for name in ours if (device := device_of(f"{name}.")) is not None}


def test_each_device_has_folders() -> None:
    found = [device for device, _ in device_files()]
    assert all(found.count(device) >= 8 for device in DEVICES)


@pytest.mark.parametrize("device", DEVICES)
def test_no_device_imports_another(device: str) -> None:
    wrong = {
        str(file): others
        for owner, file in device_files()
        if owner == device and (others := devices_in(imported(file)) - {device})
    }
    assert not wrong


def test_a_devices_folders_are_imported_where_they_are_used() -> None:
    """In a function that the device alone calls, or by a registry: an installation may be without them."""
    wrong = {
        str(file): devices
        for owner, file in device_files()
        if owner is None and (devices := devices_in(imported(file, types=False, functions=False)))
    }
    assert not wrong


def test_no_file_outside_is_named_after_a_device() -> None:
    assert not {
        str(file)
        for owner, file in device_files()
        if owner is None and file.name.startswith(PREFIXES) and file.parent.name != "device"
    }
