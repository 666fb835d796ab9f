"""Indexes blocks by their tokens, to find one whose first tokens a request has, too."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request

MOST_COMPARED = 64
"""The number of blocks that are compared with a request's tokens: the latest ones with the same beginning."""

Place = tuple[int, Hashable, int]
"""A block's KV-cache group, what precedes it (the hash of the block before it), and its first token."""


class Match(NamedTuple):
    """A block, and how many of its first tokens a request has."""

    block: KVCacheBlock
    tokens: int


class _Held:
    """A block and its tokens: those of a live request, which may grow, or those that a finished request has left."""

    def __init__(self, block: KVCacheBlock, place: Place, request: Request, start: int) -> None:
        self.block = block
        self.place = place
        self._request: Request | None = request
        self._start = start
        self._left: list[int] = []

    def tokens(self, most: int) -> list[int]:
        """Returns at most `most` of its first tokens that are written and certain."""
        if self._request is None:
            return self._left[:most]
        return _written(self._request, self._start, most)

    def allotted(self, most: int) -> list[int]:
        """Returns the same plus the tokens that the step being scheduled writes."""
        if self._request is None:
            return []
        return self._request.all_token_ids[self._start : self._start + most]

    def leave(self, request: Request, block_size: int) -> bool:
        """Keeps the tokens of a request that is leaving; returns whether the block has any tokens then."""
        if self._request is request:
            self._left, self._request = _written(request, self._start, block_size), None
        return bool(self._left) or self._request is not None


def _written(request: Request, start: int, most: int) -> list[int]:
    """Returns tokens that are written: `num_computed_tokens` counts earlier steps only; drafts are not known."""
    end = min(start + most, request.num_computed_tokens, request.num_tokens)
    return request.all_token_ids[start:end] if end > start else []


class PartialBlocks:
    """Tracks the content of each block that a request was given, until the block is given to another request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # blocks are the same objects for as long as their pool lives
        self._held: dict[int, _Held] = {}
        self._at: dict[Place, dict[int, _Held]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, block: KVCacheBlock) -> bool:
        return id(block) in self._held

    def follow(
        self, request: Request, root: Hashable, blocks: Sequence[KVCacheBlock], first: int, group: int = 0
    ) -> int:
        """Follows blocks of a request in a KV-cache group, from logical block `first` on, as far as it is known what
        precedes them. Null blocks, before a window, hold nothing.

        root: what precedes block 0. Returns the logical block to continue with.
        """
        known = min(len(blocks), len(request.block_hashes) + 1, -(-request.num_tokens // self._block_size))
        for number in range(first, known):
            if blocks[number].is_null:
                continue
            start = number * self._block_size
            before = request.block_hashes[number - 1] if number else root
            place = (group, before, request.all_token_ids[start])
            self._put(_Held(blocks[number], place, request, start))
        return max(first, known)

    def leave(self, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        """Called when the blocks' request leaves; what it has written stays known until others get them."""
        for block in blocks:
            held = self._held.get(id(block))
            if held is not None and not held.leave(request, self._block_size):
                self.forget(block)

    def forget(self, block: KVCacheBlock) -> None:
        held = self._held.pop(id(block), None)
        if held is not None:
            alike = self._at[held.place]
            del alike[id(block)]
            if not alike:
                del self._at[held.place]

    def clear(self) -> None:
        self._held.clear()
        self._at.clear()

    def find(
        self, before: Hashable, wanted: Sequence[int], targets: Collection[int] = (), group: int = 0
    ) -> tuple[Match | None, int]:
        """Finds the block of a group that has the most of the tokens `wanted` after `before`. Returns it with the
        number of tokens that a block will have which the step being scheduled fills. targets: ids of objects, blocks
        that this step copies to.
        """
        alike = self._at.get((group, before, wanted[0]), {}) if wanted else {}
        best, coming = None, 0
        for held in islice(reversed(alike.values()), MOST_COMPARED):
            count = 0 if id(held.block) in targets else _agree(held.tokens(len(wanted)), wanted)
            if count and (best is None or count > best.tokens):
                best = Match(held.block, count)
            coming = max(coming, _agree(held.allotted(len(wanted)), wanted))
            if count == len(wanted):
                break
        return best, coming

    def _put(self, held: _Held) -> None:
        self.forget(held.block)
        self._held[id(held.block)] = held
        self._at.setdefault(held.place, {})[id(held.block)] = held


def _agree(left: Sequence[int], right: Sequence[int]) -> int:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))
