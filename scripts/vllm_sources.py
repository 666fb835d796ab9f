"""Fetches vLLM's source distribution, which has its tests, with pip, and unpacks it below .cache/vllm-sources.

usage: python scripts/vllm_sources.py VERSION     prints the folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/vllm-sources"
STDERR = 2  # the descriptor: a caller may have replaced the object
BACKEND = Path(__file__).with_name("metadata_backend.py")


class SourcesError(RuntimeError):
    """The source distribution could not be had."""


def fetch(version: str, cache: Path = CACHE) -> Path:
    """Returns the folder of vLLM's sources in this version, with `vllm/` and `tests/`; downloads it once.

    Raises `SourcesError` if pip does not find or get it, or if the archive has unsafe entries.
    """
    try:
        public = Version(version).public
    except InvalidVersion as error:
        raise SourcesError(f"{version!r} is no version of vLLM; expected one such as 0.33.0") from error
    folder = cache / f"vllm-{public}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as temporary:
        archive = download(public, Path(temporary))
        top = unpack(archive, Path(temporary) / "tree")
        try:
            top.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def download(version: str, folder: Path) -> Path:
    """Makes pip download the source distribution into `folder`, checked against the hash of the index; returns its
    path.

    pip gets the metadata from a build backend. vLLM's would run its setup.py, and need torch and compilers; the
    stand-in returns the archive's metadata.
    """
    stand_in = folder / "stand-in" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    shutil.copy(BACKEND, stand_in / "build_meta.py")
    archives = folder / "archives"
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *("--no-build-isolation", "--no-binary", "vllm", "--dest", str(archives), f"vllm=={version}"),
    ]
    path = os.pathsep.join(filter(None, (str(stand_in.parent), os.environ.get("PYTHONPATH"))))
    # pip's own lines and progress go to stderr: the caller's output may be read by a program
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=STDERR, check=False)
    found = sorted(archives.glob("vllm-*.tar.gz")) if archives.is_dir() else []
    if run.returncode or len(found) != 1:
        raise SourcesError(
            f"vLLM {version}: pip got no source distribution (exit status {run.returncode}; its messages are above); "
            f"check the version and pip's index, or unpack the sources into {CACHE / f'vllm-{version}'} yourself"
        )
    return found[0]


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the files and folders of a tar archive, no links, below `folder`; returns its single folder.

    Raises `SourcesError` if an entry would be elsewhere, or if there is more than one folder at the top.
    """
    with tarfile.open(archive) as tar:
        # like tarfile's filter "data", which Python 3.11.2 lacks
        wanted = [entry for entry in tar.getmembers() if entry.isreg() or entry.isdir()]
        for entry in wanted:
            path = PurePosixPath(entry.name)
            if path.is_absolute() or ".." in path.parts:
                raise SourcesError(f"{archive.name}: the entry {entry.name!r} leads out of the archive's folder")
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.uid, entry.gid = os.getuid(), os.getgid()
            entry.uname = entry.gname = ""
        tar.extractall(folder, members=wanted)
    top = list(folder.iterdir())
    if len(top) != 1 or not top[0].is_dir():
        raise SourcesError(f"{archive.name}: expected one folder at the top, found {sorted(p.name for p in top)}")
    return top[0]


def main() -> None:
    """Prints the folder of the version that the command line names."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(fetch(sys.argv[1]))
    except SourcesError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
