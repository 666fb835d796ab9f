"""Computes how many blocks a bucket holds of each KV-cache group except the first: a function of the bucket alone.

The sizes in a bucket belong to the first group. A group that sees less needs less, and the bucket determines how much,
so there is one graph for each bucket whatever the number of groups.
"""

from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.limits import Limits


class GroupBlocks(NamedTuple):
    """Blocks of one group: those used by several rows, and by one row."""

    shared: int
    unique: int


def most_blocks(window: int, block_size: int) -> int:
    """Returns the most cached blocks that the rows of one request see at once under a window of `window` tokens."""
    return -(-(window - 1) // block_size) + 1


def group_room(shape: ForwardShape, limits: Limits, in_window: int | None) -> GroupBlocks:
    """Returns the blocks of a group that a bucket has room for.

    in_window: `most_blocks` of the group's window, for each request: rows x (window / block + 1) in all. A block that
        several rows use is sometimes in the window of only one of them, so a window has at most as many unique blocks
        as the bucket has shared and unique ones. None: the group has full attention, and as many blocks as the first.
    """
    if in_window is None:
        return GroupBlocks(shape.shared_blocks, shape.unique_blocks)
    most = min(shape.query_len, limits.max_num_seqs) * in_window
    return GroupBlocks(min(most, shape.shared_blocks), min(most, shape.shared_blocks + shape.unique_blocks))


def with_groups(step: Bucket, others: list[tuple[GroupBlocks, int | None]]) -> Bucket:
    """Raises a step's shape until its buckets have room for its other groups, too.

    Mostly they do: requests that share a block of the first group also share those of the others. Exceptions occur if
    several copies of a prefix have been computed and some are evicted.

    others: for each group the blocks of the step, and `in_window` of `group_room`. No group exceeds the limit of shared
        blocks: steps are divided by the blocks of each group.
    """
    shared, unique = step.shared_blocks, step.unique_blocks
    for blocks, in_window in others:
        shared = max(shared, blocks.shared)
        unique = max(unique, blocks.unique - (0 if in_window is None else shared))
    if (shared, unique) == (step.shared_blocks, step.unique_blocks):
        return step
    phase = phase_string("c" in step.phase, shared > 0, unique > 0)
    return step._replace(phase=phase, shared_blocks=shared, unique_blocks=unique)
