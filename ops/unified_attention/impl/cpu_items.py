"""What rows read from the cache, as items that can be batched, and calls with a mask of their own where they cannot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cpu_call import BlockCall, as_run, range_bias
from vllm_gaudi_ucm.ops.unified_attention.parts import SharedGroup, SharedPart, UniquePart

TILE_TOKENS = 16384  # longer contexts are cut and merged, so that scratch memory stays bounded
MASK_ELEMENTS = 1 << 22  # of a bias, which differs from row to row only where a group is not exact


class Item(NamedTuple):
    """Rows that see the same tokens of the cached blocks `entries[start:start + blocks]`, the last at `tokens - 1`."""

    rows: tuple[int, ...]
    start: int
    blocks: int
    tokens: int


class Entries(NamedTuple):
    """Visible blocks of all items: int64 block ids and the token range [lo, hi) in each."""

    blocks: Tensor
    lo: Tensor
    hi: Tensor


def add_unique_items(part: UniquePart, block_size: int, items: list[Item], pieces: list[Entries]) -> None:
    """One item per single row, cut where it is longer than a tile."""
    blocks = torch.arange(part.rows.shape[0]) if part.blocks is None else part.blocks
    chosen, entries = _visible_entries(blocks, part.lo, part.hi, block_size, part.rows)
    rows, counts = torch.unique_consecutive(part.rows[chosen], return_counts=True)
    ends = entries.hi.tolist()
    start = sum(piece.blocks.shape[0] for piece in pieces)
    pieces.append(entries)
    offset = start
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        _cut((row,), start, count, ends[start - offset :][:count], block_size, items)
        start += count


def add_shared_items(
    part: SharedPart,
    group: SharedGroup,
    block_size: int,
    items: list[Item],
    pieces: list[Entries],
    masked: list[BlockCall],
) -> None:
    """A group whose rows see the same tokens is an item; else its rows are called with a mask of their own."""
    columns = slice(group.block_lo, group.block_hi)
    blocks = part.blocks[columns]
    spans = part.row_spans[group.rows]
    distinct, which = spans.unique(return_inverse=True)
    lo = part.lo[distinct, columns].clamp(min=0)
    hi = part.hi[distinct, columns].clamp(max=block_size)
    empty = hi <= lo
    lo, hi = lo.masked_fill(empty, 0), hi.masked_fill(empty, 0)
    if bool((lo == lo[:1]).all()) and bool((hi == hi[:1]).all()):
        if lo.shape[0] == 0:
            return
        _, entries = _visible_entries(blocks, lo[0], hi[0], block_size, None)
        count = entries.blocks.shape[0]
        if count:
            start = sum(piece.blocks.shape[0] for piece in pieces)
            pieces.append(entries)
            _cut(tuple(group.rows.tolist()), start, count, entries.hi.tolist(), block_size, items)
        return
    seen = ~empty
    for tile in range(0, blocks.shape[0], max(1, TILE_TOKENS // block_size)):
        piece = slice(tile, tile + max(1, TILE_TOKENS // block_size))
        used = seen[:, piece].any(0).nonzero().squeeze(1) + tile
        if used.numel():
            masked += _masked_calls(group.rows, which, blocks[used], lo[:, used], hi[:, used], block_size)


def _visible_entries(
    blocks: Tensor, lo: Tensor, hi: Tensor, block_size: int, rows: Tensor | None
) -> tuple[Tensor, Entries]:
    """Drops empty ranges and orders by row, a row's partial blocks last: then what it sees is mostly a prefix.

    Returns the chosen indices and their entries.
    """
    lo, hi = lo.clamp(min=0), hi.clamp(max=block_size)
    if rows is None and bool((hi - lo)[:-1].eq(block_size).all()) and int(lo[-1]) == 0 < int(hi[-1]):
        return torch.arange(blocks.shape[0]), Entries(blocks, lo, hi)
    chosen = (hi > lo).nonzero().squeeze(1)
    rank = ((hi - lo) < block_size).long()[chosen]
    if rows is not None:
        rank += 2 * rows[chosen]
    chosen = chosen[rank.argsort(stable=True)]
    return chosen, Entries(blocks[chosen], lo[chosen], hi[chosen])


def _cut(rows: tuple[int, ...], start: int, count: int, ends: list[int], block_size: int, items: list[Item]) -> None:
    tile = max(1, TILE_TOKENS // block_size)
    for first in range(0, count, tile):
        blocks = min(tile, count - first)
        items.append(Item(rows, start + first, blocks, (blocks - 1) * block_size + ends[first + blocks - 1]))


def _masked_calls(
    rows: Tensor, spans: Tensor, blocks: Tensor, lo: Tensor, hi: Tensor, block_size: int
) -> list[BlockCall]:
    """Calls for rows [k] whose spans see different tokens; rows that see none of these blocks take no part."""
    tokens = blocks.shape[0] * block_size
    bias = range_bias(lo, hi, block_size)
    takes_part = (hi > lo).any(1)[spans]
    rows, spans = rows[takes_part], spans[takes_part]
    calls = []
    for chunk, chunk_spans in zip(*(t.split(max(1, MASK_ELEMENTS // tokens)) for t in (rows, spans)), strict=True):
        mask = bias[chunk_spans][None, None]
        calls.append(BlockCall(as_run(chunk), 1, len(chunk), as_run(blocks), tokens, mask, False))
    return calls
