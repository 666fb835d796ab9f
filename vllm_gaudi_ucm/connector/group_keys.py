"""Keys of blocks in each KV-cache group."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

Tables = Sequence[Sequence[int]]
"""Block ids of a request in each group, in the order of its context; 0 if no token sees a block any more."""


class GroupBlock(NamedTuple):
    """A block of one group: the key that it is stored under, and its id on the device."""

    key: bytes
    block_id: int


class GroupKeys:
    """A block of a context is stored in parts, one for each group, each under a key of its own.

    All parts are saved when the block is full, including those of windows: a prompt may continue after any block. In a
    group with a window, a continuing prompt loads only the last blocks.

    Args:
        windows: for each group, the most tokens that the next one sees; None: all.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        self.count = count = len(windows)
        self._windows = windows
        self._block_size = block_size
        # one group has the keys of its blocks
        self._marks = [b"", *(f"kv cache group {number}".encode() for number in range(1, count))]

    def keys_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns the keys of consecutive blocks in all groups, block by block. keys: keys of the blocks."""
        if self.count == 1:
            return list(keys)
        return [hashlib.sha256(key + mark).digest() if mark else key for key in keys for mark in self._marks]

    def seen(self, keys: Sequence[bytes], end: int) -> list[bytes]:
        """Returns the `keys` of blocks up to `end` that the next token sees: with a window, the last blocks."""
        tokens, first = end * self._block_size, end - len(keys) // self.count
        begins = [0 if one is None else max(0, tokens - one + 1) // self._block_size for one in self._windows]
        return [key for place, key in enumerate(keys) if first + place // self.count >= begins[place % self.count]]

    def on_device(self, keys: Sequence[bytes], tables: Tables, first: int) -> list[GroupBlock]:
        """Returns the consecutive blocks that a request has on the device.

        keys: as `of` returns them, of block `first` and following ones.
        """
        found = []
        for place, key in enumerate(keys):
            number, group = divmod(place, self.count)
            if block_id := tables[group][first + number]:
                found.append(GroupBlock(key, block_id))
        return found
