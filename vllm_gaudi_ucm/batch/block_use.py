"""Divides requests into groups whose blocks fit the largest bucket, if those of a whole step do not."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Room(NamedTuple):
    """The capacity of the largest bucket.

    shared_blocks: distinct blocks that more than one row uses. ranges: shared and unique ranges together, if each token
        has its own slot; blocks always fit.
    """

    shared_blocks: int
    ranges: int


def fitting_groups(
    contexts: Iterable[NDArray[np.integer]], num_rows: NDArray[np.integer], room: Room
) -> list[list[int]]:
    """Returns groups of request indices, in order; each group takes as many requests as fit.

    Args:
        contexts: for each request the blocks of its cached context, or first slots of ranges.
        num_rows: [requests] new tokens of each.
        room: capacity of a group.
    """
    groups: list[list[int]] = [[]]
    use = _Use(set(), set())
    for index, found in enumerate(contexts):
        blocks, rows = set(found.tolist()), int(num_rows[index])
        shared = use.newly_shared(blocks, rows)
        if groups[-1] and not use.has_room(blocks, shared, room):
            groups.append([])
            use = _Use(set(), set())
            shared = use.newly_shared(blocks, rows)
        groups[-1].append(index)
        use.shared.update(shared)
        use.any.update(blocks)
    return groups


class _Use(NamedTuple):
    """Blocks that the requests of a group use: all of them, and those that more than one row uses."""

    any: set[int]
    shared: set[int]

    def newly_shared(self, blocks: set[int], rows: int) -> set[int]:
        """Returns the blocks that become shared once a request of `rows` rows also uses `blocks`."""
        return (blocks if rows > 1 else blocks & self.any) - self.shared

    def has_room(self, blocks: set[int], shared: set[int], room: Room) -> bool:
        """Returns whether a request that uses `blocks`, and makes `shared` shared, may be added."""
        return len(self.shared) + len(shared) <= room.shared_blocks and len(self.any | blocks) <= room.ranges
