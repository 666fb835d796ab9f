"""New tokens among themselves: tiles of rows on and below the diagonal of each slice, equal slices side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_sizes import causal_rows, score_tokens, slice_tokens
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu_tile import Scaling, accumulate, attend_tile
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, CausalSlice, Partial


class Rows(NamedTuple):
    """Rows `first + i * step + lo` to `first + i * step + hi` for i < slices: the same rows of adjacent slices."""

    first: int
    slices: int
    step: int
    lo: int
    hi: int

    @property
    def end(self) -> int:
        return self.first + (self.slices - 1) * self.step + self.hi

    def of(self, tensor: Tensor) -> Tensor:
        """[slices, hi - lo, ...], a view."""
        begin = self.first + self.lo
        if self.slices == 1:
            return tensor[begin : begin + self.hi - self.lo][None]
        return tensor[begin : self.end].unfold(0, self.hi - self.lo, self.step).movedim(-1, 1)


class CausalTile(NamedTuple):
    """Rows that are computed together, and the keys that they are multiplied with, equally many for each slice."""

    rows: Rows
    keys: tuple[Rows, ...]


def causal_tiles(part: CausalPart, key: Tensor, value: Tensor, heads: int, apart: int) -> Iterator[CausalTile]:
    """Tiles that cover the rows of all slices once. Slices that begin before row `apart` are not put side by side."""
    slices = sorted(one for one in part.slices if one.query_hi > one.query_lo)
    tokens = slice_tokens(key, value)
    place = 0
    while place < len(slices):
        count = 1 if slices[place].query_lo < apart else _alike(slices, place)
        one = slices[place]
        yield from _tiles(one, count, heads, max(1, tokens // max(1, one.query_hi - one.key_lo)))
        place += count


def _alike(slices: list[CausalSlice], place: int) -> int:
    """How many slices from this one on are the same square, one behind the other."""
    lo, hi, key_lo, key_hi = slices[place]
    step, count = hi - lo, 1
    for other in slices[place + 1 :]:
        offset = count * step
        if other != (lo + offset, hi + offset, key_lo + offset, key_hi + offset):
            break
        count += 1
    return count


def _tiles(one: CausalSlice, count: int, heads: int, most: int) -> Iterator[CausalTile]:
    """Of `count` equal slices, at most so many at a time: all their rows, while their keys are on the chip."""
    lo, hi, key_lo, key_hi = one
    step = hi - lo
    length = causal_rows(step, hi - key_lo)
    for first in range(0, count, most):
        here = min(most, count - first)
        for row_lo in range(lo, hi, length):
            row_hi = min(row_lo + length, hi)
            last = min(key_hi, row_hi)
            width = score_tokens(heads, row_hi - row_lo)
            together = max(1, width // max(1, last - key_lo))
            for begin in range(0, here, together):
                rows = Rows((first + begin) * step, min(together, here - begin), step, row_lo, row_hi)
                spans = ((at, min(at + width, last)) for at in range(key_lo, last, width))
                yield CausalTile(rows, tuple(rows._replace(lo=at, hi=end) for at, end in spans))


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, part: CausalPart, scaling: Scaling, tile: CausalTile
) -> Partial | None:
    """Partial [slices, rows, heads, ...] of a tile, None where it has no keys."""
    position = torch.arange(query.shape[0], device=query.device)
    rows, own = scaling.apply(tile.rows.of(query)), tile.rows.of(part.groups)[..., None]
    row_position = tile.rows.of(position)[..., None]
    found: Partial | None = None
    for keys in tile.keys:
        visible = (own == keys.of(part.groups)[:, None]) & (own >= 0)
        visible = visible & (keys.of(position)[:, None] <= row_position)
        piece = attend_tile(rows, keys.of(key), keys.of(value), visible)
        found = accumulate(found, piece)
    return found
