"""Builds the C++ kernels of this folder into a cache, keyed by all that decides what a compiler makes of them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
COMPILERS = ("g++", "c++")
# -ffast-math is left out: NaN and Inf must survive. Errno and traps of arithmetic are nobody's concern here.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message says which and what it said."""


def build(cache: Path | None = None) -> Path:
    """The library for this machine: from the cache (default: the user's), or built into it in about two seconds.

    Raises BuildError.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")
    folder = cache
    try:
        folder = folder or Path.home() / ".cache" / "vllm-gaudi-ucm" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign(folder)
        library = folder / f"kernels-{_key(compiler)}.so"
        if not library.is_file():
            _compile(compiler, library)
    except (OSError, RuntimeError) as error:
        raise BuildError(f"cannot build in {folder or 'the home folder'}: {error}") from error
    return library


def refuse_foreign(folder: Path) -> None:
    """PermissionError if others may put something into the folder: what lies there is loaded or believed."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError("it belongs to another user, or others may write to it")


def _compile(compiler: str, library: Path) -> None:
    """Compiles beside the library and moves it into place, so that nobody ever loads half of it."""
    sources = sorted(SOURCE.glob("*.cpp"))
    if not sources:
        raise BuildError(f"{SOURCE} holds no *.cpp: the package was installed without its data files")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as work:
        objects = []
        for source in sources:
            objects.append(str(Path(work) / f"{source.stem}.o"))
            _call([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        # Linked without -fopenmp: OpenMP's symbols are found in the process, which has torch's OpenMP and must not get
        # a second one, with threads of its own.
        built = Path(work) / library.name
        _call([compiler, "-shared", *objects, "-o", str(built)])
        built.replace(library)


def _call(command: list[str]) -> None:
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not finish in {TIMEOUT_S:.0f} s") from None
    if finished.returncode:
        raise BuildError(f"{command[0]} failed: {finished.stderr.strip()[-2000:]}")


def _key(compiler: str) -> str:
    """Source, flags, compiler and CPU."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    status = Path(compiler).resolve().stat()
    facts = (*FLAGS, str(Path(compiler).resolve()), str(status.st_size), str(status.st_mtime_ns), cpu_features())
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:20]


def cpu_features() -> str:
    """What -march=native looks at: the first CPU's lines of /proc/cpuinfo that name its model and features."""
    names = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
    )
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in names)
