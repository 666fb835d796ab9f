"""Builds the C++ kernels of this folder into a cache, keyed by everything that affects the compiled code."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from vllm_gaudi_ucm.envs import environment_without, user_cache
from vllm_gaudi_ucm.private_folder import foreign, make_private_folder

COMPILERS = ("g++", "c++")
TIMEOUT_S = 120.0
MOST_AT_ONCE = 4  # a compiler takes some 200 MB, and the model loads at the same time
# Variables from which GCC and the linker take paths of headers, libraries and their own parts, options to add, and
# extra output files.
NOT_PASSED = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LD_RUN_PATH",
    "LDEMULATION",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "SOURCE_DATE_EPOCH",
)
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))

# Remedies for a BuildError and for a CacheError.
INSTALL = "install a C++ compiler that works, such as the package g++"
KEEP = "set XDG_CACHE_HOME to a folder that this user may write to, with free space, on a mount without noexec"


class BuildError(RuntimeError):
    """No compiler was found, or it failed; the message names it and quotes its output."""


class CacheError(BuildError):
    """This folder cannot hold a build or be loaded from; another folder may. The message names the remedy."""


class _Job(NamedTuple):
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    deadline: float


def find_compiler() -> str:
    """The path of a C++ compiler. Raises BuildError if there is none."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")
    return compiler


def identity(compiler: str) -> tuple[str, ...]:
    """Returns what distinguishes a compiler: its file and, since that may be a wrapper, its version output."""
    file = Path(compiler).resolve()
    status = file.stat()
    try:
        asked = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} --version did not finish in {TIMEOUT_S:.0f} s") from None
    return str(file), str(status.st_size), str(status.st_mtime_ns), asked.stdout


def run_compilers(commands: Sequence[Sequence[str]], work: Path) -> None:
    """Runs compilers on all cores, started in this order. work: a folder for their temporary files.

    Raises BuildError if one fails, CacheError if it fails for lack of space; the others are then terminated.
    """
    environment = {**environment_without(NOT_PASSED), "LC_ALL": "C", "TMPDIR": str(work)}
    at_once = min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)
    waiting, running = list(reversed(commands)), list[_Job]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(), environment))
            time.sleep(0.005)
            running = [job for job in running if not _has_finished(job)]
    finally:
        for job in running:
            job.process.kill()
            job.process.wait()


def _start(command: Sequence[str], environment: dict[str, str]) -> _Job:
    # the output stays in memory: on a full disk the compiler could not write that the disk is full
    said = os.fdopen(os.memfd_create("said"), "w+b")
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    return _Job(process, said, time.monotonic() + TIMEOUT_S)


def _has_finished(job: _Job) -> bool:
    """True if a compiler has ended. Raises BuildError or CacheError if it has failed."""
    compiler = str(job.process.args[0])  # type: ignore[index]  # a list, as it was given
    status = job.process.poll()
    if status is None:
        if time.monotonic() > job.deadline:
            raise BuildError(f"{compiler} did not finish in {TIMEOUT_S:.0f} s")
        return False
    with job.said as said:
        said.seek(0)
        text = said.read().decode(errors="replace").strip()[-2000:]
    if status:
        kind = CacheError if any(words in text for words in _NO_ROOM) else BuildError
        raise kind(f"{compiler} failed: {text or f'status {status}'}")
    return True


_PRIVATE_FILE = 0o600  # reading is enough for loading
_SEAL = 32


def seal(library: Path) -> None:
    """Appends the checksum, denies access to other users whatever the umask, and returns once the file is on disk."""
    with library.open("r+b") as file:
        file.write(_checksum(library, file.read()))
        file.flush()
        os.fchmod(file.fileno(), _PRIVATE_FILE)
        os.fsync(file.fileno())


def fault(library: Path) -> str:
    """Returns why a file must not be loaded, in words; empty if it may be. Raises OSError if it cannot be read."""
    try:
        descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "it is a link"
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "it is not a file"
        if found := foreign(status):
            return f"it {found}"
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(descriptor)
    if content[-_SEAL:] != _checksum(library, content[:-_SEAL]):
        return f"it has {len(content)} bytes, which do not end with their checksum: it was truncated or changed"
    return ""


def _checksum(library: Path, content: bytes) -> bytes:
    """Covers the name too, which is the key of what the library was built from."""
    return hashlib.sha256(library.name.encode() + b"\0" + content).digest()


logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source")
# -ffast-math is left out: NaN and Inf must survive. Errno and arithmetic traps do not matter here.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
MARCH = ("-march=native",)
# Linked without -fopenmp: OpenMP's symbols are found in the process, which has torch's OpenMP and must not get a second
# one, with threads of its own.
LINK_FLAGS = ("-shared",)
_UNFINISHED = ".building-"
STALE_S = 3600.0  # longer than any build
PATIENCE_S = 120.0  # while another process builds


def build(cache: Path | None = None) -> Path:
    """The checked library for this machine, from the cache (default: the user's), built first if it is not there.

    A build takes about 13 CPU seconds; up to four compilers run at once. If several processes need it, one builds and
    the others wait. A library that is damaged, or writable by other users, is rebuilt with a warning.

    Raises:
        CacheError: the cache cannot be loaded from safely, or cannot be written to.
        BuildError: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    folder = cache
    try:
        folder = folder or user_cache() / "native"
        make_private_folder(folder)
        _refuse_noexec(folder)
        _sweep(folder)
        library = folder / f"kernels-{_key(compiler)}.so"
        if fault(library):
            with alone(folder):
                # another process may have built it in the meantime
                if found := fault(library):
                    _compile(compiler, library, found)
    except CacheError as error:
        raise CacheError(f"{folder}: {error}") from error
    except BuildError:
        raise
    except (OSError, RuntimeError) as error:
        raise CacheError(f"cannot build in {folder or 'the cache'}: {error}") from error
    return library


def _refuse_noexec(folder: Path) -> None:
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise CacheError("it lies on a mount with the option noexec, from which no library can be loaded")


def _sweep(folder: Path) -> None:
    """Removes files that killed builds left behind."""
    for work in folder.glob(f"{_UNFINISHED}*"):
        try:
            age = time.time() - work.stat().st_mtime
        except FileNotFoundError:
            continue  # it was finished in the meantime
        if age > STALE_S:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time, if the lock works: two builds at once do no harm, but double the work."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # its holder may have been stopped
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks, or NFS, which cannot lock folders


def _compile(compiler: str, library: Path, found: str) -> None:
    """Compiles to a temporary file and moves it into place, so that no process ever loads half a library."""
    if os.path.lexists(library):
        logger.warning("%s is not loaded: %s; rebuilding it", library, found)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as work:
        built = Path(work) / library.name
        compiles, link = commands(compiler, Path(work), built, MARCH)
        run_compilers(compiles, Path(work))
        run_compilers([link], Path(work))
        seal(built)
        built.replace(library)
        _write_through(library.parent)


def commands(compiler: str, work: Path, library: Path, march: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The commands that compile each source for a CPU, the longest work first, and the command that links the library.

    work: the folder of the objects. Raises BuildError if there are no sources.
    """
    sources = sorted(_sources("*.cpp"), key=lambda source: source.stat().st_size, reverse=True)
    if not sources:
        raise BuildError(f"{SOURCE} holds no *.cpp: the package was installed without its data files")
    objects = [str(work / f"{source.stem}.o") for source in sources]
    pairs = zip(sources, objects, strict=True)
    compiles = [[compiler, *FLAGS, *march, "-c", str(source), "-o", made] for source, made in pairs]
    return compiles, [compiler, *LINK_FLAGS, *objects, "-o", str(library)]


def _write_through(folder: Path) -> None:
    """Returns once the folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sources(*patterns: str) -> list[Path]:
    """Returns the files that match, without hidden ones, which belong to editors."""
    found = (path for pattern in patterns for path in SOURCE.glob(pattern))
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _key(compiler: str) -> str:
    """Hash of source, flags, compiler and CPU; `run` hides from the compiler whatever else could change a build."""
    digest = hashlib.sha256()
    for source in _sources("*.cpp", "*.h"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *MARCH, *LINK_FLAGS, *identity(compiler), cpu_features())).encode())
    return digest.hexdigest()[:20]


def cpu_features() -> str:
    """Returns what -march=native depends on: the lines of /proc/cpuinfo with the first CPU's model and features."""
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
