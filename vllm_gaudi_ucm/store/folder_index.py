"""What a store's folder holds, in the order of use, as far as this process has seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_gaudi_ucm.store.medium import StoredBlock


@dataclass
class Entry:
    """leaf: the folder that the record lies in. used: mtime in ns. added: the index's own count, for `replace`."""

    leaf: str
    used: int
    added: int


class FolderIndex:
    """Not safe between threads by itself: its owner holds a lock."""

    def __init__(self) -> None:
        self._entries: OrderedDict[StoredBlock, Entry] = OrderedDict()
        self._leaves: dict[str, set[StoredBlock]] = {}
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return self._bytes

    @property
    def moment(self) -> int:
        """Says of entries whether they were added before or after now."""
        return self._count

    def leaves(self) -> list[str]:
        """The folders that hold blocks."""
        return list(self._leaves)

    def use(self, block: StoredBlock, leaf: str, used: int) -> None:
        """The block is there and was used at `used`: it becomes the newest."""
        if block not in self._entries:
            self._bytes += block.block_bytes
            self._leaves.setdefault(leaf, set()).add(block)
        self._count += 1
        self._entries[block] = Entry(leaf, used, self._count)
        self._entries.move_to_end(block)

    def drop(self, block: StoredBlock) -> None:
        """The block is not there any more."""
        entry = self._entries.pop(block, None)
        if entry is not None:
            self._bytes -= block.block_bytes
            blocks = self._leaves[entry.leaf]
            blocks.remove(block)
            if not blocks:
                del self._leaves[entry.leaf]

    def oldest(self) -> tuple[StoredBlock, int] | None:
        """The least recently used block, and when that was."""
        for block, entry in self._entries.items():
            return block, entry.used
        return None

    def replace(self, leaf: str, found: Iterable[tuple[StoredBlock, int]], moment: int) -> None:
        """A leaf was listed: only what was `found` (with mtimes) is there.

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
        """Puts entries in the order of use; after `replace` those of others stand where they were found."""
        self._entries = OrderedDict(sorted(self._entries.items(), key=lambda item: item[1].used))

    def check_integrity(self) -> None:
        """The bytes are those of the entries, and each entry is in its leaf."""
        assert self._bytes == sum(block.block_bytes for block in self._entries)
        assert sum(map(len, self._leaves.values())) == len(self._entries)
        assert all(block in self._leaves[entry.leaf] for block, entry in self._entries.items())
