"""Checks that only its owner may write to a folder or a file whose content is executed or trusted."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700
_UID_MAP, _UNKNOWN_USER = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_EVERY_USER = ["0", "0", "4294967295"]


def make_private_folder(folder: Path) -> None:
    """Makes a folder, and refuses one that others could fill or replace.

    Raises:
        PermissionError: it or a folder above is open to others; the message names it, what was found and what to do.
        OSError: it cannot be made.
    """
    make_folders(folder)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    refuse_foreign(folder)
    for above in folder.resolve().parents:
        _refuse_exchange(above)


def make_folders(path: Path | str) -> None:
    """Makes a folder and those above it, for their owner only. Existing entries stay, even if they are not folders."""
    if os.path.lexists(path):  # maybe on a read-only file system
        return
    try:
        os.mkdir(path, PRIVATE)
    except FileExistsError:  # made by another process meanwhile
        return
    except FileNotFoundError:
        above = os.path.dirname(path)
        if not above or above == os.fspath(path):
            raise
        make_folders(above)
        # only once more: /proc reports this for every folder
        with suppress(FileExistsError):
            os.mkdir(path, PRIVATE)


def refuse_foreign(path: Path) -> None:
    """PermissionError if others may put something into a folder, or change a file."""
    status = path.stat()
    if fault := foreign(status):
        raise PermissionError(
            f"{path}: it {fault}, expected mode {PRIVATE:04o} and user {os.geteuid()}; see what is in it, then remove "
            f"it, or chown it and chmod go-w {path}"
        )


def foreign(status: os.stat_result) -> str:
    """Returns in words why others may write to a file of this status; empty if they may not."""
    mode = stat.S_IMODE(status.st_mode)
    if not is_own(status):
        return f"belongs to another user ({status.st_uid}, mode {mode:04o})"
    if others_may_write(status):
        return f"has mode {mode:04o}: others may write to it"
    return ""


def is_own(status: os.stat_result) -> bool:
    """True if it belongs to the user of this process."""
    return status.st_uid == os.geteuid()


def others_may_write(status: os.stat_result) -> bool:
    """True if its mode lets its group or everybody write."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def is_private(path: Path) -> bool:
    """True if it is a folder, not a link, that only this user can read and write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status) and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _refuse_exchange(above: Path) -> None:
    """Refuses a folder in which others may rename files. The user's group may: it often has no other member."""
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
    """Returns who may own the folders above ours: this user, and root.

    A user namespace (Apptainer, rootless containers) shows the files of unknown users as those of one user, and the
    machine's root is often one of them.
    """
    owners = {os.geteuid(), 0}
    try:
        if _UID_MAP.read_text().split() != _EVERY_USER:
            owners.add(int(_UNKNOWN_USER.read_text()))
    except (OSError, ValueError):
        pass  # no /proc: then no other user is trusted
    return owners
