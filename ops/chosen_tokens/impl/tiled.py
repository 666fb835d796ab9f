"""Choosing tokens and attention over them in tiles of rows, at shapes that do not depend on values: for any device, and
for graphs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.chosen_tokens.implementation import ChosenTokensImplementation, IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.chosen_tokens.score_memory import NUMBERS, ROWS, rows_of_tile
from vllm_gaudi_ucm.ops.unified_attention.parts import NEG_INF, SharedPart, UniquePart


class TiledChosenTokens(ChosenTokensImplementation):
    """Nothing is read on the host, so it may be captured and traced."""

    def choose(self, index: IndexRows, keys: Tensor, places: TokenPlaces, count: int) -> Tensor:
        parts, rows = places.parts, len(places.slots)
        shared = None if parts.shared is None else _Shared.of(parts.shared, keys, places.block_size)
        unique = None if parts.unique is None else _Unique.of(parts.unique, index, keys, places.block_size)
        singles = 0 if parts.unique is None else min(parts.unique.num_rows, rows)
        step = rows_of_tile(_most_tokens(places), ROWS, NUMBERS)
        bounds = [*range(0, singles, step), *range(singles, rows, step), rows]
        found = []
        for lo, hi in pairwise(bounds):
            tile = _Candidates([], [])
            if shared is not None:
                shared.add(tile, index, lo, hi)
            if unique is not None and lo < singles:
                unique.add(tile, lo, hi)
            _add_new(tile, index, places, lo, hi)
            found.append(tile.best(hi - lo, count, places.slots))
        return torch.cat(found) if found else places.slots.new_empty((0, count))

    def attend(self, query: Tensor, cache: Tensor, slots: Tensor, scale: float, value_size: int) -> Tensor:
        rows, heads, _ = query.shape
        count, wide = slots.shape[1], _wide(query.dtype)
        found = query.new_zeros((rows, heads, value_size))
        if not count or not rows:
            return found
        step = max(1, min(ROWS, NUMBERS // (count * max(cache.shape[1], heads))))
        pieces = []
        for lo in range(0, rows, step):
            chosen = slots[lo : lo + step]
            seen = chosen >= 0
            keys = cache.index_select(0, chosen.clamp(min=0).flatten()).view(*chosen.shape, -1).to(query.dtype)
            # of slots that nothing was chosen for; what they hold may be no number
            keys = keys.masked_fill(~seen[..., None], 0.0)
            scores = _product(query[lo : lo + step], keys.transpose(1, 2), wide) * scale
            scores = scores.masked_fill(~seen[:, None], NEG_INF)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - torch.where(top == NEG_INF, 0.0, top))
            total = weights.sum(-1, keepdim=True)
            values = _product(weights.to(query.dtype), keys[..., :value_size], wide)
            pieces.append((values / torch.where(total == 0, 1.0, total)).to(query.dtype))
        return torch.cat(pieces)


def _most_tokens(places: TokenPlaces) -> int:
    """Returns a bound of the tokens of a tile, known on the host."""
    parts, size = places.parts, places.block_size
    found = 0 if parts.shared is None else len(parts.shared.blocks) * size
    if parts.unique is not None:
        assert parts.unique.most_of_row is not None, "validated"
        found += parts.unique.most_of_row * size
    slices = () if parts.causal is None else parts.causal.slices
    return found + max((one.query_hi - one.key_lo for one in slices), default=0)


class _Candidates(NamedTuple):
    """Tokens among which the rows of a tile choose.

    scores: of each part, [rows, tokens], -inf for a token that a row does not see. slots: of each part, [rows or 1,
    tokens].
    """

    scores: list[Tensor]
    slots: list[Tensor]

    def best(self, rows: int, count: int, like: Tensor) -> Tensor:
        """Returns int64 [rows, count], the slots of the best tokens in their order; -1 for none."""
        tokens = sum(one.shape[1] for one in self.scores)
        if not tokens:
            return like.new_full((rows, count), -1)
        scores = torch.cat(self.scores, 1)
        kept = min(count, tokens)
        least = scores.topk(kept, 1, sorted=True).values[:, -1:]
        above, equal = scores > least, (scores == least) & (scores > NEG_INF)
        # a topk of values is free to take any of equal ones
        room = kept - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1) <= room))
        # float32 has every integer up to 16 million
        order = torch.arange(tokens, 0, -1, dtype=torch.float32, device=scores.device)
        ranks = torch.where(chosen, order, 0.0).topk(kept, 1, sorted=True).values
        taken = (ranks > 0).to(torch.int64)
        at = (tokens - ranks).clamp(max=tokens - 1).to(torch.int64)
        at = at + torch.arange(rows, device=at.device)[:, None] * tokens
        slots = torch.cat([one.expand(rows, -1) for one in self.slots], 1).flatten()
        # no `where`: Gaudi's compiler is known to get it wrong for integers
        slots = slots.index_select(0, at.flatten()).view(rows, kept) * taken + taken - 1
        if kept == count:
            return slots
        return torch.cat((slots, slots.new_full((rows, count - kept), -1)), 1)


class _Shared(NamedTuple):
    """Shared blocks, gathered once for all tiles. keys: [tokens, dim]. slots: int64 [1, tokens]."""

    part: SharedPart
    keys: Tensor
    slots: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, part: SharedPart, keys: Tensor, size: int) -> _Shared:
        offsets = torch.arange(size, device=keys.device)
        slots = (part.blocks[:, None] * size + offsets).flatten()
        return cls(part, keys.index_select(0, slots), slots[None], offsets)

    def add(self, tile: _Candidates, index: IndexRows, lo: int, hi: int) -> None:
        rows = torch.arange(lo, hi, device=self.keys.device)
        first, end = self.part.lo_of(rows), self.part.hi[self.part.row_spans[lo:hi]]
        seen = (self.offsets >= first[..., None]) & (self.offsets < end[..., None])
        tile.scores.append(_scores(index, lo, hi, self.keys).masked_fill(~seen.flatten(1), NEG_INF))
        tile.slots.append(self.slots)


class _Unique(NamedTuple):
    """Blocks of single rows, scored once for all tiles: [rows, blocks of a row * block size]."""

    scores: Tensor
    slots: Tensor

    @classmethod
    def of(cls, part: UniquePart, index: IndexRows, keys: Tensor, size: int) -> _Unique:
        assert part.places is not None, "validated"
        assert part.most_of_row is not None, "validated"
        count, heads, rows, width = len(part.rows), index.query.shape[1], part.num_rows, part.most_of_row
        offsets, wide = torch.arange(size, device=keys.device), _wide(index.query.dtype)
        blocks = torch.arange(count, device=keys.device) if part.blocks is None else part.blocks
        step = max(1, NUMBERS // (size * max(heads, keys.shape[1])))
        pieces = []
        for lo in range(0, count, step):
            owners = part.rows[lo : lo + step]
            slots = (blocks[lo : lo + step, None] * size + offsets).flatten()
            tokens = keys.index_select(0, slots).view(len(owners), size, -1)
            products = _product(index.query.index_select(0, owners), tokens.transpose(1, 2), wide).relu()
            weights = index.weights.index_select(0, owners).to(wide)
            pieces.append(torch.bmm(weights[:, None], products)[:, 0])
        seen = (offsets >= part.lo[:, None]) & (offsets < part.hi[:, None])
        scores = torch.cat(pieces).masked_fill(~seen, NEG_INF)
        # blocks that no row sees go to one more place
        is_seen, nowhere = (part.hi > part.lo).to(torch.int64), rows * width
        # no `where`: Gaudi's compiler is known to get it wrong for integers
        at = nowhere + is_seen * (part.rows * width + part.places - nowhere)
        table = scores.new_full((rows * width + 1, size), NEG_INF).index_copy(0, at, scores)
        of_place = blocks.new_zeros(rows * width + 1).index_copy(0, at, blocks)
        slots = (of_place[:-1, None] * size + offsets).view(rows, width * size)
        return cls(table[:-1].view(rows, width * size), slots)

    def add(self, tile: _Candidates, lo: int, hi: int) -> None:
        tile.scores.append(self.scores[lo:hi])
        tile.slots.append(self.slots[lo:hi])


def _add_new(tile: _Candidates, index: IndexRows, places: TokenPlaces, lo: int, hi: int) -> None:
    """Adds the new tokens that these rows may see."""
    causal = places.parts.causal
    if causal is None:
        return
    reach = [one for one in causal.slices if one.query_lo < hi and one.query_hi > lo]
    if not reach:
        return
    begin = min(one.key_lo for one in reach)
    groups, numbers = causal.groups, torch.arange(begin, hi, device=places.slots.device)
    own = groups[lo:hi, None]
    seen = (groups[begin:hi] == own) & (own >= 0) & (numbers <= numbers[lo - begin :, None])
    tile.scores.append(_scores(index, lo, hi, index.key[begin:hi]).masked_fill(~seen, NEG_INF))
    tile.slots.append(places.slots[None, begin:hi])


def _scores(index: IndexRows, lo: int, hi: int, keys: Tensor) -> Tensor:
    """Returns [rows, tokens], scores of all of these tokens for the rows lo .. hi."""
    rows, heads, dim = index.query[lo:hi].shape
    wide = _wide(index.query.dtype)
    query, weights = index.query[lo:hi].reshape(1, rows * heads, dim), index.weights[lo:hi, None].to(wide)
    step = max(1, NUMBERS // (rows * heads))
    pieces = []
    for first in range(0, len(keys), step):
        products = _product(query, keys[None, first : first + step].transpose(1, 2), wide).relu()
        pieces.append(torch.bmm(weights, products.view(rows, heads, -1))[:, 0])
    return torch.cat(pieces, 1)


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Returns batches of products with sums in `wide`."""
    if left.dtype == wide:
        return torch.bmm(left, right)
    if left.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=wide)
    return torch.bmm(left.to(wide), right.to(wide))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
