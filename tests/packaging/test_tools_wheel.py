"""The wheel of the developer tools holds them, and the server's wheel holds none of them."""

from __future__ import annotations

import configparser
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from vllm_gaudi_ucm.cli.main import COMMANDS, TOOLS

PACKAGE = "vllm_gaudi_ucm_tools"


def text_of(wheel: Path, name: str) -> str:
    """A file of the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (member for member in archive.namelist() if member.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


def modules_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(".py")}


def entry_points(wheel: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string(text_of(wheel, "entry_points.txt"))
    return parser


def test_every_module_of_the_tools_is_in_their_wheel(tools_wheel: Path, source: Path) -> None:
    folder = source / "tools"
    expected = {str(file.relative_to(folder)) for file in (folder / PACKAGE).rglob("*.py")}
    assert len(expected) > 50
    assert modules_in(tools_wheel) == expected


def test_the_server_has_none_of_them(wheel: Path) -> None:
    assert not [name for name in modules_in(wheel) if PACKAGE in name]
    assert "vllm_gaudi_ucm.commands" not in entry_points(wheel)


def test_entry_points_name_modules_of_the_wheel(tools_wheel: Path) -> None:
    parser = entry_points(tools_wheel)
    commands = dict(parser["vllm_gaudi_ucm.commands"])
    assert set(commands) == set(TOOLS)
    assert not set(commands) & set(COMMANDS)
    places = [*commands.values(), *dict(parser["vllm_gaudi_ucm.parts"]).values()]
    modules = {f"{place.partition(':')[0].replace('.', '/')}.py" for place in places}
    assert modules <= modules_in(tools_wheel)


def test_the_tools_bring_the_server_and_what_they_need(tools_wheel: Path, wheel: Path) -> None:
    metadata = HeaderParser().parsestr(text_of(tools_wheel, "METADATA"))
    needed = " ".join(metadata.get_all("Requires-Dist") or [])
    assert all(name in needed for name in ("vllm-gaudi-ucm", "gguf", "accelerate", "matplotlib"))
    assert metadata["Version"] == HeaderParser().parsestr(text_of(wheel, "METADATA"))["Version"]
