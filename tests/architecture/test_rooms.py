"""Which room imports which: only what the table of docs/architecture.md allows, types included."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT, TOOLS, imported, module_of, room_of, sources

ROW = re.compile(r"^\| `(\w+)` \|[^|]+\|([^|]*)\|$", re.MULTILINE)
NEITHER = {"batch": ("torch", "vllm"), "options": ("torch", "vllm"), "ops": ("vllm",), "graphs": ("vllm",)}


def allowed() -> dict[str, set[str]]:
    """Of the table, in its order: room to rooms."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {room: set(filter(None, map(str.strip, others.split(",")))) for room, others in ROW.findall(text)}


@cache
def arrows() -> dict[str, set[str]]:
    """Room to the rooms that it imports."""
    rooms = set(allowed())
    found: dict[str, set[str]] = {}
    for room, file in sources():
        for name in imported(file):
            if name.partition(".")[0] not in (PACKAGE, TOOLS):
                continue
            other = room_of(name)
            found.setdefault(room, set()).add(other if other in rooms else "root")
    return {room: others - {room} for room, others in found.items()}


def test_every_room_is_in_the_table() -> None:
    """A room without a line, or a line without a room."""
    assert {room for room, _ in sources()} == set(allowed())


def test_rooms_import_only_what_stands_above_them() -> None:
    """The table has no circle."""
    above: set[str] = set()
    for room, others in allowed().items():
        assert others <= above, f"{room} may import {sorted(others - above)}, which the table has below it"
        above.add(room)


@pytest.mark.parametrize("room", sorted(allowed()))
def test_imports_of_a_room_are_allowed(room: str) -> None:
    wrong = arrows().get(room, set()) - allowed()[room]
    assert not wrong, f"{room} imports {sorted(wrong)}; add it to docs/architecture.md only if it stands above {room}"


@pytest.mark.parametrize(("room", "packages"), NEITHER.items())
def test_rooms_without_torch_or_vllm(room: str, packages: tuple[str, ...]) -> None:
    """Types of them are fine: they are not imported."""
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for there, file in sources()
        if there == room
        for name in imported(file, types=False)
        if name.partition(".")[0] in packages
    }
    assert not found


PUBLIC = {"vllm", "vllm.config", "vllm.envs", "vllm.platforms", "vllm.sampling_params"}
"""Modules of vLLM that any room may import: what its documentation tells users and plugins to import."""


def test_internals_of_vllm_are_imported_in_one_room() -> None:
    """Types included. `vllm_api` has a module for each subject; a room imports vLLM's names from there."""
    internals = {}
    for room, file in sources():
        modules = {name.rpartition(".")[0] for name in imported(file) if name.partition(".")[0] == "vllm"}
        if room != "vllm_api" and modules - PUBLIC - {""}:
            internals[str(file.relative_to(ROOT))] = sorted(modules - PUBLIC)
    assert not internals


FEWEST_INTERNALS = 20


def test_the_room_of_vllm_is_not_empty() -> None:
    """The test above would pass where nothing is found."""
    found = {
        name for room, file in sources() if room == "vllm_api" for name in imported(file) if name.startswith("vllm.")
    }
    assert len(found) > FEWEST_INTERNALS


MOST_LINES = 400


def test_files_can_be_read_in_one_sitting() -> None:
    """One noun per file, and none above this."""
    long = {str(file): n for _, file in sources() if (n := len(file.read_text("utf-8").splitlines())) > MOST_LINES}
    assert not long


A_SPLINTER = 40


def test_helpers_of_one_file_stand_in_it() -> None:
    """A small file that nothing but one other of its folder imports, and that would fit into it, is no noun of its own.

    Imports in functions do not count: such a file brings what the other one must not load. An implementation of an
    operation has a file of its own, however small.
    """
    files = [file for room, file in sources() if room != "ops" and file.name != "__init__.py"]
    lines = {file: len(file.read_text("utf-8").splitlines()) for file in files}
    importers: dict[str, set[Path]] = {}
    for _, file in sources():
        for name in imported(file, functions=False):
            # a module, or a name in one
            for module in (name, name.rpartition(".")[0]):
                importers.setdefault(module, set()).add(file)
    splinters = {}
    for file, count in lines.items():
        others = importers.get(module_of(file), set())
        if count <= A_SPLINTER and len(others) == 1:
            (other,) = others
            if other.parent == file.parent and count + lines.get(other, MOST_LINES) <= MOST_LINES:
                splinters[str(file.relative_to(ROOT))] = other.name
    assert not splinters
