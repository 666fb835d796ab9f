"""The parts of a step as items of the C++ kernel: rows, and the spans that all of them see.

A span is a range of tokens of a block of the cache: of a block that the parts name, or of one that each layer names for
an entry of the selected part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
)

Ints = NDArray[np.int64]

NO_CAUSAL = -1
NO_ENTRY = -1


@dataclass
class Item:
    """Rows that see the same spans.

    spans: [..., 4] block, lo, hi, entry of the selected part or NO_ENTRY.
    causal_first: the rows are consecutive and also see the new tokens from there on.
    """

    rows: Ints
    spans: Ints
    causal_first: int = NO_CAUSAL


def make_items(parts: AttentionParts, block_size: int) -> list[Item]:
    """The items of a step; every (row, token) pair of the parts is in exactly one of them."""
    chunks = {} if parts.causal is None else {item.causal_first: item for item in _chunks(parts.causal)}
    singles = {} if parts.unique is None else {int(i.rows[0]): i for i in _unique_items(parts.unique, block_size)}
    items = []
    for item in _shared_items(parts.shared, block_size) if parts.shared is not None else ():
        # a prompt chunk and its own context: one pass over both
        if not _joined(chunks, item):
            items.append(item)
    for item in _selected_items(parts.selected, block_size) if parts.selected is not None else ():
        # with a decode's live blocks, with a verification's drafts
        if not _joined(singles, item) and not _joined(chunks, item):
            items.append(item)
    return [*chunks.values(), *items, *singles.values()]


def _joined(others: dict[int, Item], item: Item) -> bool:
    """Adds the item's spans to the one of the others, keyed by first row, that has the same rows; False if none has."""
    other = others.get(int(item.rows[0]))
    if other is None or not np.array_equal(other.rows, item.rows):
        return False
    other.spans = np.concatenate((other.spans, item.spans))
    return True


def _chunks(part: CausalPart) -> Iterator[Item]:
    """One item per group, without cached tokens so far."""
    groups = part.groups.numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    for first, stop in zip(starts, np.append(starts, len(groups))[1:], strict=True):
        if groups[first] >= 0:
            yield Item(np.arange(first, stop), np.zeros((0, 4), np.int64), int(first))


def _shared_items(part: SharedPart, block_size: int) -> Iterator[Item]:
    for group in part.groups:
        yield from _group_items(part, group, block_size)


def _group_items(part: SharedPart, group: SharedGroup, block_size: int) -> Iterator[Item]:
    """Rows of a group by what they see: mostly all of them see the same."""
    rows, columns = group.rows.numpy(), slice(group.block_lo, group.block_hi)
    blocks = part.blocks.numpy()[columns]
    owners, which = np.unique(part.row_spans.numpy()[rows], return_inverse=True)
    lo = np.maximum(part.lo.numpy()[owners, columns], 0)
    hi = np.minimum(part.hi.numpy()[owners, columns], block_size)
    lo, hi = np.where(hi > lo, lo, 0), np.where(hi > lo, hi, 0)
    ranges, kind = np.unique(np.concatenate((lo, hi), 1), axis=0, return_inverse=True)
    kind = kind.reshape(-1)[which.reshape(-1)]
    for index, (low, high) in enumerate((pair[: len(blocks)], pair[len(blocks) :]) for pair in ranges):
        seen = high > low
        if seen.any():
            yield Item(rows[kind == index], _spans(blocks[seen], low[seen], high[seen]))


def _unique_items(part: UniquePart, block_size: int) -> Iterator[Item]:
    """One item per single row."""
    rows = part.rows.numpy()
    blocks = np.arange(len(rows)) if part.blocks is None else part.blocks.numpy()
    lo, hi = np.maximum(part.lo.numpy(), 0), np.minimum(part.hi.numpy(), block_size)
    chosen = np.flatnonzero(hi > lo)
    chosen = chosen[np.argsort(rows[chosen], kind="stable")]
    spans = _spans(blocks[chosen], lo[chosen], hi[chosen])
    for row, first, stop in _runs(rows[chosen]):
        yield Item(np.array([row]), spans[first:stop])


def _selected_items(part: SelectedPart, block_size: int) -> Iterator[Item]:
    """One item per span that has rows and blocks; the blocks are named by their entries."""
    owners, hi = part.spans.numpy(), np.minimum(part.hi.numpy(), block_size)
    first_rows, num_rows = part.first_rows.numpy(), part.num_rows.numpy()
    entries = np.flatnonzero((hi > 0) & (num_rows[owners] > 0))
    entries = entries[np.argsort(owners[entries], kind="stable")]
    spans = _spans(part.blocks.numpy()[entries], np.zeros_like(entries), hi[entries], entries)
    for owner, first, stop in _runs(owners[entries]):
        yield Item(np.arange(first_rows[owner], first_rows[owner] + num_rows[owner]), spans[first:stop])


def _spans(blocks: Ints, lo: Ints, hi: Ints, entries: Ints | None = None) -> Ints:
    if entries is None:
        entries = np.full(len(blocks), NO_ENTRY)
    return np.stack((blocks, lo, hi, entries), 1).astype(np.int64)


def _runs(owners: Ints) -> Iterator[tuple[int, int, int]]:
    """Each owner of a sorted array with its range."""
    which, starts = np.unique(owners, return_index=True)
    yield from zip(which.tolist(), starts.tolist(), np.append(starts, len(owners))[1:].tolist(), strict=True)
