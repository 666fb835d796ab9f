"""`scripts/vllm_sources.py`: vLLM's source distribution from pip's index, without running any of its code."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from scripts.vllm_sources import SourcesError, fetch, unpack

BUILD = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'


def archive(file: Path, entries: dict[str, str], links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        for name, text in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        for name in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(entry)
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a vLLM whose build would fail."""
    folder = tmp_path / "index"
    folder.mkdir()
    metadata = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.77.0\nRequires-Dist: torch==9.9\n"
    archive(
        folder / "vllm-0.77.0.tar.gz",
        {
            "vllm-0.77.0/PKG-INFO": metadata,
            "vllm-0.77.0/pyproject.toml": BUILD,
            "vllm-0.77.0/setup.py": "raise SystemExit('the build ran')",
            "vllm-0.77.0/vllm/__init__.py": "",
            "vllm-0.77.0/tests/test_a.py": "def test_a(): pass",
        },
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_sources_are_fetched_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    folder = fetch("0.77.0", cache)
    assert (folder / "tests/test_a.py").read_text() == "def test_a(): pass"
    assert [path.name for path in cache.iterdir()] == ["vllm-0.77.0"]
    (index / "vllm-0.77.0.tar.gz").unlink()
    assert fetch("0.77.0+cpu", cache) == folder
    assert capfd.readouterr().out == ""


def test_an_unknown_version_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SourcesError, match=r"vLLM 0\.78\.0: pip got no source distribution"):
        fetch("0.78.0", tmp_path / "cache")
    with pytest.raises(SourcesError, match="'next' is no version"):
        fetch("next", tmp_path / "cache")


def test_entries_outside_and_links_are_not_unpacked(tmp_path: Path) -> None:
    file = archive(tmp_path / "a.tar.gz", {"vllm/a.py": ""}, links=("vllm/link",))
    assert [path.name for path in unpack(file, tmp_path / "a").iterdir()] == ["a.py"]
    for name in ("../outside.py", "/outside.py"):
        file = archive(tmp_path / "b.tar.gz", {"vllm/a.py": "", name: ""})
        with pytest.raises(SourcesError, match="leads out of the archive's folder"):
            unpack(file, tmp_path / "b")
    assert not (tmp_path / "outside.py").exists()
