"""Files and folders as a store handles them: what has gone meanwhile is no error, and nobody else may read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def make_folder(path: str) -> None:
    """Makes a folder and those above it, for their owner only."""
    try:
        os.mkdir(path, PRIVATE_FOLDER)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        make_folder(path)


def create_file(path: str) -> int:
    """A descriptor of a new file. Raises FileExistsError, FileNotFoundError where its folder is missing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)


def open_file(path: str) -> int:
    """A descriptor to read from; a link is refused. Raises FileNotFoundError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


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


def move_file(source: str, target: str) -> None:
    """Puts a file in another's place in one piece, in a folder that may have to be made."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        make_folder(os.path.dirname(target))
        os.rename(source, target)


def remove_file(path: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def remove_unless_locked(path: str) -> bool:
    """Whether it was there and no living process holds its lock."""
    descriptor = open_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_file(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def entries(path: str) -> list[os.DirEntry[str]]:
    """What lies in a folder, nothing where there is none."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def folders(path: str) -> Iterator[os.DirEntry[str]]:
    """The folders in a folder, links left out."""
    return (entry for entry in entries(path) if entry.is_dir(follow_symlinks=False))
