"""Handles files and folders of a store: named relative to a descriptor, no links followed, private to their owner."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm_gaudi_ucm.private_folder import PRIVATE

_PRIVATE_FILE = 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_folder(name: str, at: int | None = None) -> int:
    """Opens a folder and returns its descriptor. Raises NotADirectoryError for anything else, FileNotFoundError."""
    return os.open(name, _FOLDER, dir_fd=at)


@contextmanager
def folder_below(at: int, path: str, make: bool = False, sync: bool = False) -> Iterator[int]:
    """Opens the folder at a relative path and returns its descriptor; links in it are refused.

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
    except FileExistsError:  # by another engine in the meantime
        return
    if sync:
        os.fsync(at)


def create_file(name: str, at: int | None = None) -> int:
    """Creates a file and returns its descriptor. Raises FileExistsError; FileNotFoundError if its folder is gone."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_FILE, dir_fd=at)


def open_file(name: str, at: int | None = None, flags: int = os.O_RDONLY) -> int:
    """Opens a file and returns its descriptor; refuses links, and never waits. Raises FileNotFoundError."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _PRIVATE_FILE, dir_fd=at)


def read_whole(descriptor: int, into: memoryview) -> int:
    """Fills `into` from the file's beginning; returns the number of bytes read, fewer if the file is shorter."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], done)
        if count == 0:
            break
        done += count
    return done


def write_whole(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def remove_file(name: str, at: int | None = None) -> bool:
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return False
    return True


def remove_unless_locked(name: str, at: int) -> bool:
    """Removes a file; True if it existed and no living process holds its lock."""
    descriptor = open_file(name, at)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_file(name, at)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def entries(folder: int | str) -> list[os.DirEntry[str]]:
    """Yields the entries of a folder, given its path or a descriptor. A descriptor must stay open while `stat` of
    entries is used, and two callers must not list it at once.
    """
    with os.scandir(folder) as found:
        return list(found)


def kind_of(mode: int) -> str:
    """Returns the type in `st_mode`, in words."""
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
