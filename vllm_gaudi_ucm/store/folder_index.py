"""What a store's folder holds, in the order of use, as far as this process has seen."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from vllm_gaudi_ucm.store.medium import StoredBlock


@dataclass
class Entry:
    """used: nanoseconds since 1970 (mtime of the file). added: the index's own count, for `replace`."""

    used: int
    added: int


class FolderIndex:
    """Not safe between threads by itself: its owner holds a lock."""

    def __init__(self) -> None:
        self._entries: OrderedDict[StoredBlock, Entry] = OrderedDict()
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

    def use(self, block: StoredBlock, used: int) -> None:
        """The block is there and was used at `used`: it becomes the newest."""
        entry = self._entries.get(block)
        if entry is None:
            self._bytes += block.block_bytes
        self._count += 1
        self._entries[block] = Entry(used, self._count)
        self._entries.move_to_end(block)

    def drop(self, block: StoredBlock) -> bool:
        """The block is not there any more; whether it was known."""
        if self._entries.pop(block, None) is None:
            return False
        self._bytes -= block.block_bytes
        return True

    def oldest(self) -> tuple[StoredBlock, int] | None:
        """The least recently used block, and when that was."""
        for block, entry in self._entries.items():
            return block, entry.used
        return None

    def replace(self, known: list[StoredBlock], found: list[tuple[StoredBlock, int]], moment: int) -> None:
        """A part of the folder was listed: of `known` only what was `found` is there.

        Entries younger than `moment`, when the listing began, stay: the listing may have missed them.
        """
        there = {block for block, _ in found}
        for block in known:
            entry = self._entries.get(block)
            if block not in there and entry is not None and entry.added <= moment:
                self.drop(block)
        for block, used in found:
            if block not in self._entries:
                self.use(block, used)

    def sort(self) -> None:
        """Puts entries in the order of use; after `replace` those of others stand where they were found."""
        self._entries = OrderedDict(sorted(self._entries.items(), key=lambda item: item[1].used))

    def check_integrity(self) -> None:
        """The bytes are those of the entries."""
        assert self._bytes == sum(block.block_bytes for block in self._entries)
