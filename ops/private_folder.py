"""Folders and files whose content is run or believed: nobody but their owner may write to them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UID_MAP, _UNKNOWN_USER = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_EVERY_USER = ["0", "0", "4294967295"]


def make_private_folder(folder: Path) -> None:
    """Makes a folder, and refuses one that others could fill, or put another in the place of.

    Raises:
        PermissionError: it or a folder above is open to others; the message says which, what was found and what to do.
        OSError: it cannot be made.
    """
    make_folders(folder)
    refuse_foreign(folder)
    for above in folder.resolve().parents:
        _refuse_exchange(above)


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it, for their owner only, whatever the umask is. One that is there stays."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        if not folder.is_dir():  # else another process has made it meanwhile
            raise


def refuse_foreign(path: Path) -> None:
    """PermissionError if others may put something into a folder, or change a file."""
    status = path.stat()
    if fault := foreign(status):
        raise PermissionError(
            f"{path}: it {fault}, expected mode {PRIVATE:04o} and user {os.getuid()}; see what is in it, then remove "
            f"it, or chown it and chmod go-w {path}"
        )


def foreign(status: os.stat_result) -> str:
    """Why others may write to what has this status, in words; empty where they may not."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        return f"belongs to another user ({status.st_uid}, mode {mode:04o})"
    if mode & _OTHERS_WRITE:
        return f"has mode {mode:04o}: others may write to it"
    return ""


def _refuse_exchange(above: Path) -> None:
    """Refuses a folder in which others may rename what is ours. The user's group may: it is often theirs alone."""
    status = above.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in _trusted_owners():
        raise PermissionError(
            f"{above}: it belongs to another user ({status.st_uid}), who may exchange the folders in it; choose a "
            "place in folders of your own"
        )
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            f"{above}: it has mode {mode:04o}: everybody may exchange the folders in it; chmod go-w {above}"
        )


def _trusted_owners() -> set[int]:
    """Who may own the folders above ours: this user, and root.

    A user namespace (Apptainer, rootless containers) shows the files of users that it does not know as one user's, and
    the machine's root is often one of them.
    """
    owners = {os.getuid(), 0}
    try:
        if _UID_MAP.read_text().split() != _EVERY_USER:
            owners.add(int(_UNKNOWN_USER.read_text()))
    except (OSError, ValueError):
        pass  # no /proc: then nobody else is trusted
    return owners
