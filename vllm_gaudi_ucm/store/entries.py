"""Files and folders as a store handles them: named below a descriptor, no link followed, private to their owner."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm_gaudi_ucm.private_folder import PRIVATE

_PRIVATE_FILE = 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_folder(name: str, at: int | None = None) -> int:
    """A descriptor of a folder. Raises NotADirectoryError for anything else, FileNotFoundError."""
    return os.open(name, _FOLDER, dir_fd=at)


@contextmanager
def folder_below(at: int, path: str, make: bool = False, sync: bool = False) -> Iterator[int]:
    """A descriptor of the folder at a relative path; links in it are refused.

    make: create missing parts. sync: so that they survive a power cut.
    """
    with ExitStack() as opened:
        for name in path.split("/"):
            try:
                inner = open_folder(name, at)
            except FileNotFoundError:
                if not make:
                    raise
                make_part(name, at, sync)
                inner = open_folder(name, at)
            opened.callback(os.close, inner)
            at = inner
        yield at


def make_part(name: str, at: int, sync: bool = True) -> None:
    """Makes a folder in another one, unless something is there. sync: so that it survives a power cut."""
    try:
        os.mkdir(name, PRIVATE, dir_fd=at)
    except FileExistsError:  # by another engine, just now
        return
    if sync:
        os.fsync(at)


def create_file(name: str, at: int | None = None) -> int:
    """A descriptor of a new file. Raises FileExistsError, FileNotFoundError where its folder has gone."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_FILE, dir_fd=at)


def open_file(name: str, at: int | None = None, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file; a link is refused, and nothing is waited for. Raises FileNotFoundError."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _PRIVATE_FILE, dir_fd=at)


def read_whole(descriptor: int, into: memoryview) -> int:
    """Fills `into` from the file's beginning; the bytes read, fewer where it ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], done)
        if count == 0:
            break
        done += count
    return done


def write_whole(descriptor: int, data: memoryview) -> None:
    """Writes all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def remove_file(name: str, at: int | None = None) -> bool:
    """True if it was there."""
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return False
    return True


def remove_unless_locked(name: str, at: int) -> bool:
    """True if it was there and no living process holds its lock."""
    descriptor = open_file(name, at)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_file(name, at)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def entries(folder: int | str) -> list[os.DirEntry[str]]:
    """The entries of a folder, given its path or a descriptor. A descriptor must stay open while entries are asked for
    their `stat`, and must not be listed by two callers at once."""
    with os.scandir(folder) as found:
        return list(found)


def kind_of(mode: int) -> str:
    """The type that `st_mode` tells, in words."""
    for is_kind, words in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return words
    return "a device"
