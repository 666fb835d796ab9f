"""Turns the parts of a step into calls of torch's CPU flash kernel, once per step.

Causal groups become squares. The cached tokens of a row or a shared group become a `CallItem`; items of similar length,
from any part, are batched into one `BlockCall`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, SharedGroup, SharedPart, UniquePart

RowIndex = slice | Tensor


class CausalCall(NamedTuple):
    """`squares` adjacent squares of `length` new tokens each, starting at row `first`; short ones have a bias.

    first_key: under a window or slopes, which use a slice of rows instead of squares: the first row whose key is
        multiplied.
    """

    first: int
    squares: int
    length: int
    bias: Tensor | None
    first_key: int | None = None


class BlockCall(NamedTuple):
    """`items` x `rows_per_item` rows against `tokens` cached tokens per item.

    blocks: int64 [items * blocks per item] to gather, or a slice of consecutive ones to read in place (one item).
    bias: fp32 [items, 1, 1 or rows_per_item, tokens], 0 or -inf; None if every token is seen.
    fresh: no earlier call of the plan writes any of these rows.
    places: fp32 [items, 1 or rows_per_item, tokens] positions of the tokens in their request, for layers with slopes.
    """

    rows: RowIndex
    items: int
    rows_per_item: int
    blocks: Tensor | slice
    tokens: int
    bias: Tensor | None
    fresh: bool
    places: Tensor | None = None


class CpuPlan(NamedTuple):
    """The calls of a layer; `fresh_rows` are first written by a call that ignores their previous contents.

    merges: more than one call writes some row, so log-sum-exps are kept.
    scratch: memory for gathered keys and values, reused by all layers because new memory costs more than the copy. So a
        plan serves one layer at a time.
    selected: the step has a selected part, which no call covers.
    positions: fp32 [rows] of the rows in their request, for layers with slopes.
    """

    causal: tuple[CausalCall, ...]
    cached: tuple[BlockCall, ...]
    fresh_rows: int
    merges: bool
    scratch: dict[str, Tensor]
    selected: bool = False
    positions: Tensor | None = None


def range_bias(lo: Tensor, hi: Tensor, block_size: int) -> Tensor:
    """Bias, fp32 [spans, blocks * block_size]: 0 for tokens in range, otherwise -inf."""
    token = torch.arange(block_size)
    visible = (token >= lo[..., None]) & (token < hi[..., None])
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf).flatten(1)


def places_of(starts: Tensor, block_size: int) -> Tensor:
    """fp32 [spans, blocks * block_size] positions of the tokens of blocks that begin at `starts` [spans, blocks]."""
    return (starts[..., None] + torch.arange(block_size)).flatten(1).float()


def as_run(ids: Tensor) -> RowIndex:
    """Returns rows or blocks as a slice if they are consecutive, because a slice is read and written without a copy."""
    first, count = int(ids[0]), ids.shape[0]
    return slice(first, first + count) if torch.equal(ids, torch.arange(first, first + count)) else ids


TILE_TOKENS = 16384  # longer contexts are cut and merged, so that scratch memory stays bounded
MASK_ELEMENTS = 1 << 22  # of a bias, which differs from row to row only if a group is not exact
MANY_HEADS = 32


class CallItem(NamedTuple):
    """Rows that see the same tokens of the cached blocks `entries[start:start + blocks]`, up to token `tokens - 1`."""

    rows: tuple[int, ...]
    start: int
    blocks: int
    tokens: int


class Entries(NamedTuple):
    """The visible blocks of all items: int64 block ids, the token range [lo, hi) in each, and, for layers with slopes,
    the position of its first token."""

    blocks: Tensor
    lo: Tensor
    hi: Tensor
    starts: Tensor


def add_unique_items(part: UniquePart, block_size: int, items: list[CallItem], pieces: list[Entries]) -> None:
    """Adds one item per single row, divided if it is longer than a tile."""
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
    items: list[CallItem],
    pieces: list[Entries],
    masked: list[BlockCall],
    by_distance: bool,
) -> None:
    """A group whose rows see the same tokens becomes an item; otherwise its rows get calls with a mask."""
    columns = slice(group.block_lo, group.block_hi)
    blocks = part.blocks[columns]
    spans = part.row_spans[group.rows]
    if part.rise is None:
        distinct, which = spans.unique(return_inverse=True)
        lo = part.lo[distinct, columns]
    else:  # each row sees its own tokens
        distinct, which = spans, torch.arange(spans.shape[0])
        lo = part.lo_of(group.rows, columns)
    starts, lo = (-lo).clamp(min=0), lo.clamp(min=0)
    hi = part.hi[distinct, columns].clamp(max=block_size)
    empty = hi <= lo
    lo, hi, starts = (one.masked_fill(empty, 0) for one in (lo, hi, starts))
    alike = bool((lo == lo[:1]).all()) and bool((hi == hi[:1]).all())
    if alike and (not by_distance or bool((starts == starts[:1]).all())):
        if lo.shape[0] == 0:
            return
        _, entries = _visible_entries(blocks, lo[0], hi[0], block_size, None, starts[0])
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
            begin = starts[:, used] if by_distance else None
            masked += _masked_calls(group.rows, which, blocks[used], lo[:, used], hi[:, used], block_size, begin)


def _visible_entries(
    blocks: Tensor, lo: Tensor, hi: Tensor, block_size: int, rows: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, Entries]:
    """Drops empty ranges and sorts by row, with a row's partial blocks last, so that the row mostly sees a prefix.

    starts: positions of the blocks; None: `lo` gives them. Returns the chosen indices and their entries.
    """
    starts = (-lo).clamp(min=0) if starts is None else starts
    lo, hi = lo.clamp(min=0), hi.clamp(max=block_size)
    if rows is None and bool((hi - lo)[:-1].eq(block_size).all()) and int(lo[-1]) == 0 < int(hi[-1]):
        return torch.arange(blocks.shape[0]), Entries(blocks, lo, hi, starts)
    chosen = (hi > lo).nonzero().squeeze(1)
    rank = ((hi - lo) < block_size).long()[chosen]
    if rows is not None:
        rank += 2 * rows[chosen]
    chosen = chosen[rank.argsort(stable=True)]
    return chosen, Entries(blocks[chosen], lo[chosen], hi[chosen], starts[chosen])


def _cut(
    rows: tuple[int, ...], start: int, count: int, ends: list[int], block_size: int, items: list[CallItem]
) -> None:
    tile = max(1, TILE_TOKENS // block_size)
    for first in range(0, count, tile):
        blocks = min(tile, count - first)
        items.append(CallItem(rows, start + first, blocks, (blocks - 1) * block_size + ends[first + blocks - 1]))


def _masked_calls(
    rows: Tensor, spans: Tensor, blocks: Tensor, lo: Tensor, hi: Tensor, block_size: int, starts: Tensor | None
) -> list[BlockCall]:
    """Calls for rows [k] whose spans see different tokens; rows that see none of these blocks are left out.

    starts: positions of the blocks [spans, blocks], for layers with slopes.
    """
    tokens = blocks.shape[0] * block_size
    places = None if starts is None else places_of(starts, block_size)
    # with slopes, each head has its own bias
    most = MASK_ELEMENTS if places is None else MASK_ELEMENTS // MANY_HEADS
    bias = range_bias(lo, hi, block_size)
    takes_part = (hi > lo).any(1)[spans]
    rows, spans = rows[takes_part], spans[takes_part]
    calls = []
    for chunk, chunk_spans in zip(*(t.split(max(1, most // tokens)) for t in (rows, spans)), strict=True):
        mask, far = bias[chunk_spans][None, None], None if places is None else places[chunk_spans][None]
        calls.append(BlockCall(as_run(chunk), 1, len(chunk), as_run(blocks), tokens, mask, False, far))
    return calls


# Measured on AVX-512 cores with 9 query and 3 kv heads of 64: benchmarks/attention_cpu.py.
WASTE_TOKENS = 256  # tokens of padding that cost about as much as one more call
CALL_TOKENS = 2048  # gathered per call; with more, the copies fall out of cache and cost page faults every time

# The kernel's loop over scores without a bias drops NaN if there is less than one vector of them: a row whose scores
# are all NaN came out as zeros (torch 2.13). With a bias it does not.
SHORT = 16


def make_plan(parts: AttentionParts, block_size: int) -> CpuPlan:
    """Forms the calls for the parts of a step; reads the parts on the host."""
    by_distance = parts.positions is not None
    causal = _causal_calls(parts.causal, by_distance) if parts.causal is not None else ()
    items: list[CallItem] = []
    pieces: list[Entries] = []
    masked: list[BlockCall] = []
    if parts.unique is not None:
        add_unique_items(parts.unique, block_size, items, pieces)
    shared = parts.shared
    for group in shared.groups if shared is not None else ():
        assert shared is not None
        add_shared_items(shared, group, block_size, items, pieces, masked, by_distance)
    calls = masked
    if items:
        entries = Entries(*(torch.cat(column) for column in zip(*pieces, strict=True)))
        calls = [*_batch(items, entries, block_size, by_distance), *masked]
    positions = None if parts.positions is None else parts.positions.float()
    return _mark_fresh(causal, calls)._replace(selected=parts.selected is not None, positions=positions)


def _causal_calls(part: CausalPart, by_distance: bool) -> tuple[CausalCall, ...]:
    """Forms calls of the groups' squares; adjacent squares of equal length are one call. Slices would not bound the
    work more tightly.

    by_distance: for layers with slopes, whose squares have a bias.
    """
    if part.first_rows is not None or by_distance:
        return tuple(_slice_calls(part, torch.zeros_like(part.groups) if part.first_rows is None else part.first_rows))
    ids, counts = torch.unique_consecutive(part.groups, return_counts=True)
    calls: list[CausalCall] = []
    first = 0
    for group, length in zip(ids.tolist(), counts.tolist(), strict=True):
        last = calls[-1] if calls else None
        if group >= 0 and last is not None and last.length == length and last.first + last.squares * length == first:
            calls[-1] = last._replace(squares=last.squares + 1)
        elif group >= 0:
            bias = torch.full((length, length), -math.inf).triu(1) if length < SHORT else None
            calls.append(CausalCall(first, 1, length, bias[None, None] if bias is not None else None))
        first += length
    return tuple(calls)


def _slice_calls(part: CausalPart, first_rows: Tensor) -> Iterator[CausalCall]:
    """Forms calls under a window or slopes: rows of each slice and group, with keys from the start of the first row's
    window.
    """
    for query_lo, query_hi, _, _ in part.slices:
        ids, counts = torch.unique_consecutive(part.groups[query_lo:query_hi], return_counts=True)
        stop = query_lo
        for group, count in zip(ids.tolist(), counts.tolist(), strict=True):
            first, stop = stop, stop + count
            if group < 0:
                continue
            # rows of a group are adjacent
            begin = max(int(first_rows[first]), int((part.groups == group).nonzero()[0]))
            key, row = torch.arange(begin, stop), torch.arange(first, stop)[:, None]
            unseen = (key > row) | (key < first_rows[first:stop, None])
            bias = torch.zeros(unseen.shape).masked_fill_(unseen, -math.inf)
            yield CausalCall(first, 1, count, bias[None, None], begin)


def _batch(items: list[CallItem], entries: Entries, block_size: int, by_distance: bool) -> list[BlockCall]:
    """Batches items with equally many rows and similar length, the longest first.

    No row is in a batch twice: a call writes each of its rows once, and a later call merges further results.
    """
    batches: list[list[CallItem]] = []
    taken: set[int] = set()
    waste = 0
    for item in sorted(items, key=lambda item: (len(item.rows), -item.tokens)):
        head = batches[-1][0] if batches else None
        waste += head.tokens - item.tokens if head is not None else 0
        fits = (
            head is not None
            and len(head.rows) == len(item.rows)
            and waste <= WASTE_TOKENS
            and taken.isdisjoint(item.rows)
            and (len(batches[-1]) + 1) * head.tokens <= CALL_TOKENS
        )
        if fits:
            batches[-1].append(item)
        else:
            batches.append([item])
            taken = set()
            waste = 0
        taken.update(item.rows)
    return [_block_call(sorted(batch), entries, block_size, by_distance) for batch in batches]


def _block_call(batch: list[CallItem], entries: Entries, block_size: int, by_distance: bool) -> BlockCall:
    """Pads the items' blocks to the longest; a pad repeats the item's first block and has an empty range."""
    tokens = max(item.tokens for item in batch)
    start = torch.tensor([[item.start] for item in batch])
    count = torch.tensor([[item.blocks] for item in batch])
    column = torch.arange(int(count.max()))
    pad = column >= count
    index = start + torch.where(pad, 0, column)
    bias = range_bias(entries.lo[index].masked_fill(pad, 0), entries.hi[index].masked_fill(pad, 0), block_size)[
        :, :tokens
    ]
    rows = torch.tensor([row for item in batch for row in item.rows])
    blocks = entries.blocks[index].flatten()
    return BlockCall(
        as_run(rows),
        len(batch),
        len(batch[0].rows),
        as_run(blocks) if len(batch) == 1 else blocks,
        tokens,
        bias[:, None, None].contiguous() if tokens < SHORT or bool((bias != 0).any()) else None,
        False,
        places_of(entries.starts[index], block_size)[:, None, :tokens] if by_distance else None,
    )


def _mark_fresh(causal: tuple[CausalCall, ...], calls: list[BlockCall]) -> CpuPlan:
    written = {row for call in causal for row in range(call.first, call.first + call.squares * call.length)}
    fresh = len(written)
    marked = []
    for call in calls:
        rows = call.rows
        mine = set(range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist())
        is_fresh = written.isdisjoint(mine)
        fresh += len(mine) if is_fresh else 0
        written |= mine
        marked.append(call._replace(fresh=is_fresh))
    merges = any(not call.fresh for call in marked)
    return CpuPlan(causal, tuple(marked), fresh, merges, {})
