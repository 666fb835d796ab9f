"""The blocks of a simulated engine: which are free, which hold a known prefix, and where they lie in the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

# Blocks that may lie unused below the highest one before the server moves blocks, and the most that it moves at once.
SLACK, MOST_MOVES = 32, 512


class BlockPool:
    """Blocks 1 to num_blocks - 1; block 0 is no request's. Freed blocks are taken again in the order of their freeing,
    and keep their prefix until then.
    """

    def __init__(self, num_blocks: int) -> None:
        # a plain dict would walk over all blocks that have left it to find the first one
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._uses = np.zeros(num_blocks, np.int64)
        self._of_key: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._place = np.arange(num_blocks)
        self._owner = np.arange(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def known(self, keys: Iterable[Hashable]) -> list[int]:
        """Returns the blocks of the longest known prefix."""
        found = []
        for key in keys:
            if (block := self._of_key.get(key)) is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a use to known blocks."""
        for block in blocks:
            self._free.pop(block, None)
            self._uses[block] += 1

    def num_taken_by(self, blocks: Iterable[int]) -> int:
        """Returns how many of these blocks are free now, so that sharing them takes room."""
        return sum(block in self._free for block in blocks)

    def take(self, count: int) -> list[int]:
        """Returns new blocks, which lose their prefix. There must be as many."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            key = self._keys.pop(block, None)
            if key is not None and self._of_key.get(key) == block:
                del self._of_key[key]
            self._uses[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends a use of each block, the last block first, as vLLM does."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None

    def name(self, block: int, key: Hashable) -> None:
        """Makes a full block known by its prefix, unless another block is."""
        if key not in self._of_key:
            self._of_key[key] = block
            self._keys[block] = key

    def highest(self, blocks: Sequence[int]) -> int:
        """Returns the highest place of these blocks."""
        return int(self._place[blocks].max()) if blocks else 0

    def compact(self) -> bool:
        """Moves the highest blocks in use to the lowest free places, if they are scattered; returns whether it did."""
        used = np.sort(self._place[np.flatnonzero(self._uses)])
        if not used.size or used[-1] - SLACK <= used.size:
            return False
        taken = np.zeros(len(self._place), np.bool_)
        taken[used] = True
        free = np.flatnonzero(~taken[1 : used[-1]]) + 1
        count = min(len(free), len(used), MOST_MOVES)
        high, low = used[::-1][:count], free[:count]
        moves = high > low
        for here, there in zip(high[moves].tolist(), low[moves].tolist(), strict=True):
            first, second = self._owner[here], self._owner[there]
            self._owner[here], self._owner[there] = second, first
            self._place[first], self._place[second] = there, here
        return True
