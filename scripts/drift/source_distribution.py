"""Sources of one version of vLLM: a folder, a source distribution, or a version that pip fetches."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tarfile
import tempfile
from pathlib import Path

from scripts import vllm_sources
from scripts.drift.source_tree import SourceTree
from scripts.drift.uses import VLLM

_VERSION = re.compile(r"\d+(\.\d+)+\w*")


class SourcesError(Exception):
    """Raised for sources that cannot be read. The message tells what to pass instead."""


class NoIndexError(SourcesError):
    """pip cannot reach a package index, or has no such version."""


def installed_sources() -> SourceTree | None:
    """The installed vLLM, which is not imported; None if there is none."""
    spec = importlib.util.find_spec(VLLM)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return None if folder is None else SourceTree({VLLM: folder})


def sources_of(named: str, cache: Path = vllm_sources.CACHE) -> SourceTree:
    """The sources that a version, a folder or a file of a source distribution names.

    Raises SourcesError if there are none.
    """
    path = Path(named)
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        # two files may have one name
        target = cache / f"{path.name.removesuffix('.tar.gz')}-{digest}"
        return _in_folder(target if target.is_dir() else _kept(path, target))
    if _VERSION.fullmatch(named):
        return _in_folder(_fetched(named, cache))
    raise SourcesError(
        f"VLLM={named}: no such folder or file, and no version such as 0.34.0; give a version, a folder with vLLM's "
        "sources, or its source distribution (.tar.gz)"
    )


def _in_folder(folder: Path) -> SourceTree:
    """The package in a folder, which may be the package itself, or a source tree that contains it."""
    for candidate in (folder / VLLM, folder):
        if (candidate / "__init__.py").is_file() and (candidate / "config").exists():
            return SourceTree({VLLM: candidate})
    raise SourcesError(f"{folder}: no package vllm there; give the folder that contains vllm/__init__.py")


def _fetched(version: str, cache: Path) -> Path:
    """Returns the folder of a version's sources, which pip may take a minute to fetch. Raises NoIndexError."""
    try:
        return vllm_sources.fetch(version, cache)
    except vllm_sources.SourcesError as error:
        raise NoIndexError(f"{error} (give VLLM=FILE or VLLM=FOLDER if you have the sources)") from error


def _kept(file: Path, target: Path) -> Path:
    """Unpacks the Python files of a source distribution's package into `target`, which is complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as holder:
        try:
            with tarfile.open(file) as archive:
                for member in archive:
                    _write(archive, member, Path(holder))
        except tarfile.TarError as error:
            raise SourcesError(f"{file} is no source distribution: {error}; give a .tar.gz of vLLM") from error
        found = [path for path in Path(holder).glob(f"*/{VLLM}") if path.is_dir()]
        if not found:
            raise SourcesError(f"{file} has no folder {VLLM}/; give a source distribution of vLLM")
        if not target.exists():
            found[0].parent.rename(target)
    return target


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Writes a Python file of the package into `folder`; skips everything else, such as links and paths that lead
    outside.
    """
    parts = Path(member.name).parts
    if not member.isreg() or not member.name.endswith(".py") or parts[1:2] != (VLLM,) or ".." in parts:
        return
    content = archive.extractfile(member)
    file = folder.joinpath(*parts)
    # an absolute name would replace the folder
    if content is None or not file.is_relative_to(folder):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.read())
