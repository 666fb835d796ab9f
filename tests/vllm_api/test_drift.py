"""`make drift`: what it prints of versions whose source distributions pip fetches, of folders, and of wrong names."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scripts.drift.__main__ import main
from scripts.drift.source_distribution import NoIndexError, SourcesError, sources_of
from scripts.drift.source_tree import SourceTree


def write_distribution(file: Path, names: dict[str, str]) -> Path:
    """A source distribution with these files."""
    with tarfile.open(file, "w:gz") as archive:
        for name, text in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return file


def test_a_source_distribution_is_unpacked_once(tmp_path: Path) -> None:
    """Only the Python files of the package."""
    names = {f"vllm-9.9/vllm/{name}": "X = 1\n" for name in ("__init__.py", "config/__init__.py", "data.json")}
    file = write_distribution(tmp_path / "vllm-9.9.tar.gz", {**names, "vllm-9.9/setup.py": "raise SystemExit\n"})
    tree = sources_of(str(file), tmp_path / "cache")
    assert tree.find("vllm.config.X") is not None
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {"__init__.py"}
    assert sources_of(str(file), tmp_path / "cache").folders == tree.folders
    assert not list((tmp_path / "cache").glob(".partial-*"))


def test_files_beside_the_folder_are_not_written(tmp_path: Path) -> None:
    names = {"vllm-9.9/vllm/../../../../escaped.py": "", "vllm-9.9/vllm/__init__.py": ""}
    file = write_distribution(tmp_path / "vllm-9.9.tar.gz", names)
    with pytest.raises(SourcesError, match="no package vllm there"):
        sources_of(str(file), tmp_path / "a" / "b" / "cache")
    assert not list(tmp_path.rglob("escaped.py"))


@pytest.mark.parametrize(
    ("named", "message"),
    [("no-such-folder", "no such folder or file, and no version"), (".", "no package vllm there")],
)
def test_wrong_sources_are_named(
    named: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", named]) == 2
    assert message in capsys.readouterr().err


def compared(named: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["compare", named, "--json"])
    return status, json.loads(capsys.readouterr().out)


def fetched(version: str) -> SourceTree:
    try:
        return sources_of(version)
    except NoIndexError as error:
        pytest.skip(f"no package index that has vLLM {version} is reachable: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_code_works_with_each_supported_version(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As its source distribution has it, whichever is installed."""
    fetched(version)
    status, report = compared(version, capsys)
    assert (status, report["broken"], report["findings"]) == (0, 0, [])


@pytest.mark.slow
def test_an_older_version_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The alarm works: 0.31 is no supported version, and what it lacks is named with the code that uses it."""
    fetched("0.31.0")
    status, report = compared("0.31.0", capsys)
    broken = [finding for finding in report["findings"] if finding["is_broken"]]
    assert status == 1
    assert report["broken"] == len(broken) > 0
    assert all(finding["says"] and finding["places"] for finding in broken)
    assert main(["compare", "0.31.0"]) == 1
    text = capsys.readouterr().out
    assert all(finding["name"] in text for finding in broken)
