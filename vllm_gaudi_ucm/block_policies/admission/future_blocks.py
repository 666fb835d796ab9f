"""Computes the most blocks of the KV cache that requests will use at one time if they run on as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN = 1 << 40
"""Steps until a request begins if they are unknown."""


class Footprint(NamedTuple):
    """The blocks that a request has and will need.

    blocks: ids of its blocks in KV-cache groups that keep whole contexts, in any order, each once; every request that
    shares a prefix lists the prefix's blocks.
    tokens: length of its current context, including tokens that are still to be computed.
    left: the most tokens that it will still generate. delay: the most steps until it generates the first of them.
    whole: number of groups that keep whole contexts. windows: for each other group, the most blocks that the request
        will have at a time. All of these count for each request, shared or not: a request that continues leaves them to
        the others.
    """

    blocks: Sequence[int]
    tokens: int
    left: int
    delay: int = 0
    whole: int = 1
    windows: tuple[int, ...] = ()


class _Ordered(NamedTuple):
    """Requests sorted by their ends, the last one first: int64 [requests] each.

    held: blocks. distinct: blocks of a request and of all before it; a shared block counts where it is held longest.
    whole: number of groups that keep whole contexts. windows: [requests, other groups] the most blocks of each.
    """

    ends: np.ndarray
    tokens: np.ndarray
    left: np.ndarray
    held: np.ndarray
    distinct: np.ndarray
    whole: np.ndarray
    windows: np.ndarray

    @classmethod
    def of(cls, footprints: Sequence[Footprint]) -> _Ordered:
        ordered = sorted(footprints, key=lambda one: one.delay + one.left, reverse=True)
        rows = [
            (one.delay + one.left, one.tokens, one.left, len(one.blocks), distinct, one.whole)
            for one, distinct in zip(ordered, _distinct([one.blocks for one in ordered]), strict=True)
        ]
        ends, tokens, left, held, counts, whole = np.array(rows, np.int64).T
        return cls(
            ends,
            tokens,
            left,
            held,
            distinct=counts,
            whole=whole,
            windows=np.array([one.windows for one in ordered], np.int64),
        )

    def more(self, tokens: np.ndarray, block_size: int) -> np.ndarray:
        """Returns the blocks for that many tokens of each request, [..., requests], beyond those in `distinct`."""
        blocks = -(-tokens // block_size)
        return np.maximum(blocks * self.whole - self.held, 0) + in_windows(blocks, self.windows)


def in_windows(blocks: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Returns how many blocks groups with a window hold when the whole context has `blocks` blocks.

    blocks: [..., requests]. windows: [requests, groups].
    """
    found = np.zeros_like(blocks)
    for most in windows.T:
        found += np.minimum(blocks, most)
    return found


def peak_blocks(footprints: Sequence[Footprint], block_size: int, *, in_step: bool = True) -> int:
    """Returns the number of distinct blocks at the time of highest use.

    Each request generates one token per step once its delay is over, keeps its blocks until its last token, and
    continues to share what it shares now. A request is at its largest when it ends, so only the ends are examined.

    in_step: False if requests generate different numbers of tokens in a step: then all are assumed to be at their
    largest at once.
    Source: the admission of LightLLM's TokenAttention, which counts tokens, without shared prefixes and delays.
    """
    if not footprints:
        return 0
    found = _Ordered.of(footprints)
    if not in_step:
        return int(found.distinct[-1] + found.more(found.tokens + found.left, block_size).sum())
    # computes a bound for each end in O(requests); only ends that may be the time of highest use are then examined
    bounds = _bounds(found, block_size)
    first = _most_at(np.array([bounds.argmax()]), found, block_size)
    return max(first, _most_at(np.flatnonzero(bounds > first), found, block_size))


def _bounds(found: _Ordered, block_size: int) -> np.ndarray:
    """Returns an upper bound for the number of blocks at the end of each request."""
    rest = np.maximum(found.tokens * found.whole - found.held * block_size, 0)
    begun = np.cumsum(rest / block_size + found.whole + found.windows.sum(1))
    there = np.cumsum(found.whole)
    return found.distinct + begun + there * np.minimum(found.ends, found.left.max()) / block_size


def _most_at(which: np.ndarray, found: _Ordered, block_size: int) -> int:
    """Returns the highest number of blocks at the given ends."""
    if not len(which):
        return 0
    growth = found.more(found.tokens + np.minimum(found.ends[which, None], found.left), block_size)
    # requests that end later are still running, and have generated as much as the time allows
    there = np.arange(len(found.ends)) <= which[:, None]
    return int((found.distinct[which] + (growth * there).sum(1)).max())


def _distinct(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Returns the distinct blocks of the first request, of the first two, and so on."""
    seen: set[int] = set()
    counts = []
    for own in blocks:
        seen.update(own)
        counts.append(len(seen))
    return counts
