"""The folder of the file store: opened, checked to be private, indexed, and made again if it is gone."""

import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.private_folder import PRIVATE, is_own, make_folders, others_may_write
from vllm_gaudi_ucm.store.entries import kind_of, make_part, open_folder
from vllm_gaudi_ucm.store.held_folder import (
    BLOCKS,
    MARKER,
    TMP,
    HeldFolder,
    NotAStoreError,
    Strangers,
    is_marked,
    record_name,
    write_mark,
)
from vllm_gaudi_ucm.store.medium import StoredBlock


class UnusableFolderError(OSError):
    """Raised if the path is not a folder that a store may use."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(f"{path} ({found}), expected {expected}")
        self.found, self.expected = f"{path} ({found})", expected


class Folder:
    """One folder. Opening makes it (`create`), or takes one that a store has made or that is empty.

    Raises `UcmConfigError` for a folder with other content, of another user, or writable by others; OSError if it
    cannot be made.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self.strangers = Strangers(path)
        self._wanted = "a new or empty folder, or one that a store of this version has made"
        if not create:
            self._wanted = f"the file {MARKER} in it, of this version"
        self._held: HeldFolder | None = None
        try:
            if create:
                self._held = self._make()
            else:
                self._check_is_store()
        except UnusableFolderError as error:
            raise UcmConfigError([Problem("store.path", error.found, error.expected)]) from error

    def hold(self) -> HeldFolder | None:
        """Returns the folder, if it exists. Raises UnusableFolderError (an OSError) if something else has taken its
        place.

        Call it before each use: the opened folder may have been removed in the meantime.
        """
        held = self._held
        if held is None or not held.is_at(str(self.path)):
            held = self._held = self._open()
        return held

    def hold_or_make(self) -> HeldFolder:
        """Returns the folder, made again if it is gone. Raises like `hold`, or OSError if it cannot be made."""
        held = self.hold()
        if held is None:
            held = self._held = self._make()
        return held

    def file(self, block: StoredBlock) -> str:
        return f"{self.path}/{BLOCKS}/{record_name(block)}"

    def close(self) -> None:
        self._held = None

    def _open(self) -> HeldFolder | None:
        """None if there is no folder, or one that has nothing in it yet."""
        with ExitStack() as opened:
            try:
                root = _open_ours(self.path, opened)
                blocks = _open_ours(self.path / BLOCKS, opened, root) if self._is_marked(root) else None
            except FileNotFoundError:
                return None
            return None if blocks is None else HeldFolder(root, blocks, opened, self.strangers)

    def _make(self) -> HeldFolder:
        """Makes what is missing of the folder; several engines may do so at once."""
        make_folders(self.path)
        with ExitStack() as opened:
            root = _open_ours(self.path, opened)
            self._is_marked(root)
            if stat.S_IMODE(os.fstat(root).st_mode) != PRIVATE:
                os.fchmod(root, PRIVATE)
                self._is_marked(root)  # an empty one may have been anybody's to write until now
            write_mark(root)
            for part in (TMP, BLOCKS):
                make_part(part, root)
                _open_ours(self.path / part, opened, root)
        held = self._open()
        if held is None:
            raise UnusableFolderError(self.path, "removed while it was being made", "that it stays")
        return held

    def _check_is_store(self) -> None:
        with ExitStack() as opened:
            try:
                is_store = self._is_marked(_open_ours(self.path, opened))
            except FileNotFoundError:
                raise UnusableFolderError(self.path, "no folder", "the folder of a file store") from None
        if not is_store:
            raise UnusableFolderError(self.path, "not the folder of a store", self._wanted)

    def _is_marked(self, root: int) -> bool:
        """False for an empty folder. Raises UnusableFolderError for one that is no store only this user can write."""
        try:
            marked = is_marked(root)
        except NotAStoreError as error:
            raise UnusableFolderError(self.path, str(error), self._wanted) from error
        status = os.fstat(root)
        if marked and others_may_write(status):
            expected = "a folder that no other user may write: check its content, then chmod 700, or name another"
            raise UnusableFolderError(self.path, f"mode {stat.S_IMODE(status.st_mode):04o}", expected)
        return marked


def _open_ours(path: Path, opened: ExitStack, at: int | None = None) -> int:
    """Opens the folder at a path, or of that name below `at`.

    Raises UnusableFolderError for a link, a file, or a folder of another user, FileNotFoundError.
    """
    try:
        descriptor = open_folder(path.name if at is not None else str(path), at)
    except NotADirectoryError:
        kind = kind_of(os.lstat(path).st_mode)
        expected = "a folder: name the one that the link points to" if kind == "a link" else "a folder"
        raise UnusableFolderError(path, f"{kind}, not a folder", expected) from None
    opened.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if not is_own(status):
        expected = f"a folder that this process's user ({os.geteuid()}) owns: run as its owner, or name another"
        raise UnusableFolderError(path, f"owned by user {status.st_uid}", expected)
    return descriptor


@dataclass
class IndexEntry:
    """A record in the index. leaf: its folder. used: mtime in ns. added: the index's own count, for `replace`."""

    leaf: str
    used: int
    added: int


class FolderIndex:
    """Blocks of a folder in the order of their use. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._entries: OrderedDict[StoredBlock, IndexEntry] = OrderedDict()
        self._leaves: dict[str, set[StoredBlock]] = {}
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def moment(self) -> int:
        """Returns a mark that tells later whether entries were added before or after."""
        return self._count

    def leaves(self) -> list[str]:
        return list(self._leaves)

    def use(self, block: StoredBlock, leaf: str, used: int) -> None:
        """Adds a block, or notes its use at `used` (ns): it becomes the newest."""
        if block not in self._entries:
            self._bytes += block.block_bytes
            self._leaves.setdefault(leaf, set()).add(block)
        self._count += 1
        self._entries[block] = IndexEntry(leaf, used, self._count)
        self._entries.move_to_end(block)

    def drop(self, block: StoredBlock) -> None:
        entry = self._entries.pop(block, None)
        if entry is not None:
            self._bytes -= block.block_bytes
            blocks = self._leaves[entry.leaf]
            blocks.remove(block)
            if not blocks:
                del self._leaves[entry.leaf]

    def oldest(self) -> tuple[StoredBlock, int] | None:
        """Returns the least recently used block and the time of its use (ns)."""
        for block, entry in self._entries.items():
            return block, entry.used
        return None

    def replace(self, leaf: str, found: Iterable[tuple[StoredBlock, int]], moment: int) -> None:
        """Replaces the entries of a listed leaf by those `found` (with mtimes).

        Entries younger than `moment`, when the listing began, stay: the listing may have missed them.
        """
        there = dict(found)
        for block in list(self._leaves.get(leaf, ())):
            if block not in there and self._entries[block].added <= moment:
                self.drop(block)
        for block, used in there.items():
            if block not in self._entries:
                self.use(block, leaf, used)

    def sort(self) -> None:
        """Sorts entries by use: `replace` appends other processes' entries in the order of the listing."""
        self._entries = OrderedDict(sorted(self._entries.items(), key=lambda item: item[1].used))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bytes match the entries, and each entry is in its leaf."""
        assert self._bytes == sum(block.block_bytes for block in self._entries)
        assert sum(map(len, self._leaves.values())) == len(self._entries)
        assert all(block in self._leaves[entry.leaf] for block, entry in self._entries.items())


_SETTLED_NS = 100_000_000
"""A folder's mtime may miss a change that follows within one tick of the clock: younger ones are not trusted."""


class FolderListing:
    """Lists the parts of a folder that have changed. One thread at a time may refresh it.

    lock: held around every use of `index`, and never during disk access.
    """

    def __init__(self, folder: Folder, index: FolderIndex, lock: threading.Lock) -> None:
        self._folder = folder
        self._index = index
        self._lock = lock
        self._mtimes: dict[str, int] = {}  # mtime of each leaf when it was listed, in ns; 0: not trusted

    def refresh(self) -> None:
        """Lists the parts of the folder that have changed since they were last listed."""
        with self._lock:
            moment, known = self._index.moment, self._index.leaves()
        begin = time.time_ns()
        held = self._folder.hold()
        leaves = {} if held is None else dict(held.leaves())
        changed = {leaf for leaf in leaves.keys() | self._mtimes.keys() if leaves.get(leaf) != self._mtimes.get(leaf)}
        # removed with the blocks that were saved since the last listing
        changed.update(leaf for leaf in known if leaf not in leaves)
        for leaf in changed:
            found = held.records(leaf) if held is not None and leaf in leaves else []
            with self._lock:
                self._index.replace(leaf, found, moment)
            self._mtimes.pop(leaf, None)
            if leaf in leaves:
                self._mtimes[leaf] = leaves[leaf] if leaves[leaf] < begin - _SETTLED_NS else 0
        if changed:
            with self._lock:
                self._index.sort()
