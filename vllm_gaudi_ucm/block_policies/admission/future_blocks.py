"""The most blocks of the KV cache that requests will use at one time, if they run on as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN = 1 << 40
"""Steps until a request begins, where nobody knows."""


class Footprint(NamedTuple):
    """What a request has, and what it will have.

    blocks: ids of its blocks in KV-cache groups that keep whole contexts, in any order, each once; a prefix that
        requests share is in each of them.
    tokens: of its context as it is, those included that are still to be computed.
    left: tokens that it will generate at most. delay: steps at most until it generates the first.
    whole: groups that keep whole contexts. windows: for each other group the most blocks that it will have at a time.
        Of these all count for each request, shared or not: one that goes on leaves them to the others.
    """

    blocks: Sequence[int]
    tokens: int
    left: int
    delay: int = 0
    whole: int = 1
    windows: tuple[int, ...] = ()


class _Ordered(NamedTuple):
    """Requests by their ends, the last one first: int64 [requests] each.

    held: blocks. distinct: blocks of a request and of all before it, a shared one counted where it is held longest.
    whole: groups that keep whole contexts. windows: [requests, other groups] their most blocks.
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
        """Blocks for so many tokens of each request, [..., requests], beyond those in `distinct`."""
        blocks = -(-tokens // block_size)
        return np.maximum(blocks * self.whole - self.held, 0) + in_windows(blocks, self.windows)


def in_windows(blocks: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Blocks of groups that keep part of a context, where it has so many.

    blocks: [..., requests]. windows: [requests, groups].
    """
    found = np.zeros_like(blocks)
    for most in windows.T:
        found += np.minimum(blocks, most)
    return found


def peak_blocks(footprints: Sequence[Footprint], block_size: int, *, in_step: bool = True) -> int:
    """Distinct blocks at the time of the most.

    Each request generates one token a step once its delay is over, keeps its blocks until its last token, and shares
    what it shares now. A request is at its largest when it ends, so only the ends are looked at.

    in_step: False where requests generate different numbers of tokens in a step: then all are at their largest at once.
    Source: the admission of LightLLM's TokenAttention, there in tokens, without shared prefixes and delays.
    """
    if not footprints:
        return 0
    found = _Ordered.of(footprints)
    if not in_step:
        return int(found.distinct[-1] + found.more(found.tokens + found.left, block_size).sum())
    # a bound for each end, in O(requests); only ends that may be the time of the most are then looked at
    bounds = _bounds(found, block_size)
    first = _most_at(np.array([bounds.argmax()]), found, block_size)
    return max(first, _most_at(np.flatnonzero(bounds > first), found, block_size))


def _bounds(found: _Ordered, block_size: int) -> np.ndarray:
    """At most so many blocks at the end of each."""
    rest = np.maximum(found.tokens * found.whole - found.held * block_size, 0)
    begun = np.cumsum(rest / block_size + found.whole + found.windows.sum(1))
    there = np.cumsum(found.whole)
    return found.distinct + begun + there * np.minimum(found.ends, found.left.max()) / block_size


def _most_at(which: np.ndarray, found: _Ordered, block_size: int) -> int:
    """The most blocks at some of the ends."""
    if not len(which):
        return 0
    growth = found.more(found.tokens + np.minimum(found.ends[which, None], found.left), block_size)
    # those that end later are still there, and have generated as much as the time allows
    there = np.arange(len(found.ends)) <= which[:, None]
    return int((found.distinct[which] + (growth * there).sum(1)).max())


def _distinct(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Distinct blocks of the first request, of the first two, and so on."""
    seen: set[int] = set()
    counts = []
    for own in blocks:
        seen.update(own)
        counts.append(len(seen))
    return counts
