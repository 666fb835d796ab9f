"""A built library as a file: with a checksum at its end, which is compared before the file is loaded.

Loading a truncated library ends the process with SIGBUS, at some time or other; what follows its last section is not
looked at by loaders.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from vllm_gaudi_ucm.ops.private_folder import foreign

_PRIVATE_FILE = 0o600  # reading is enough for loading
_SEAL = 32


def seal(library: Path) -> None:
    """Appends the checksum, keeps others out whatever the umask is, and returns when all of it is on the disk."""
    with library.open("r+b") as file:
        file.write(_checksum(library, file.read()))
        file.flush()
        os.fchmod(file.fileno(), _PRIVATE_FILE)
        os.fsync(file.fileno())


def fault(library: Path) -> str:
    """What speaks against loading a file, in words; empty where nothing does. Raises OSError if it cannot be read."""
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
            return "it is no file"
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
    """Of the name as well: it is the key of what it was built from."""
    return hashlib.sha256(library.name.encode() + b"\0" + content).digest()
