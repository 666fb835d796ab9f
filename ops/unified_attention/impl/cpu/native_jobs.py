"""Turns the parts of a step into jobs of the C++ kernel: the tokens that each row sees, and the places of partial
results.

A job is a tile of rows that see the same cached tokens; rows of a prompt chunk also see its earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, SelectedPart, SharedPart, UniquePart

Ints = NDArray[np.int64]

NO_CAUSAL = -1
NO_ENTRY = -1
RANGE_SIZE = 5


@dataclass
class JobItem:
    """Rows that see the same token ranges of blocks.

    ranges: [..., 5] block, lo, hi, entry of the selected part or NO_ENTRY, position of the block (with slopes).
    causal_first: the rows are consecutive, and also see the new tokens from this row on.
    rise: [rows], under a window: how much later ranges begin for each row; lo may be below 0, see SharedPart.
    first_rows: [rows], under a window: the first new token that each row sees.
    """

    rows: Ints
    ranges: Ints
    causal_first: int = NO_CAUSAL
    rise: Ints | None = None
    first_rows: Ints | None = None


def make_items(parts: AttentionParts, block_size: int) -> list[JobItem]:
    """Makes the items of a step; each visible (row, token) pair is in exactly one of them."""
    chunks = {} if parts.causal is None else {item.causal_first: item for item in _chunks(parts.causal)}
    singles = {} if parts.unique is None else {int(i.rows[0]): i for i in _unique_items(parts.unique, block_size)}
    items = []
    for item in _items_of(parts.shared, block_size) if parts.shared is not None else ():
        # a prompt chunk and its own context: one pass over both
        if not _joined(chunks, item):
            items.append(item)
    for item in _selected_items(parts.selected, block_size) if parts.selected is not None else ():
        # decodes of live blocks together, and drafts of a verification together
        if not _joined(singles, item) and not _joined(chunks, item):
            items.append(item)
    return [*chunks.values(), *items, *singles.values()]


def _joined(others: dict[int, JobItem], item: JobItem) -> bool:
    """Adds the item's ranges to the item among `others` (by first row) that has the same rows; False if none has."""
    other = others.get(int(item.rows[0]))
    if other is None or not np.array_equal(other.rows, item.rows):
        return False
    other.ranges = np.concatenate((other.ranges, item.ranges))
    if item.rise is not None:
        other.rise = item.rise
    return True


def _chunks(part: CausalPart) -> Iterator[JobItem]:
    """One item per group, without cached tokens so far."""
    groups = part.groups.numpy()
    starts = [0, *((groups[1:] != groups[:-1]).nonzero()[0] + 1).tolist()] if len(groups) else []
    for first, stop in zip(starts, [*starts[1:], len(groups)], strict=False):
        if groups[first] >= 0:
            first_rows = None if part.first_rows is None else part.first_rows.numpy()[first:stop].astype(np.int64)
            yield JobItem(np.arange(first, stop), np.zeros((0, RANGE_SIZE), np.int64), first, None, first_rows)


def _items_of(part: SharedPart, block_size: int) -> Iterator[JobItem]:
    return _shared_items(part, block_size) if part.rise is None else _rising_items(part, part.rise.numpy(), block_size)


def _rising_items(part: SharedPart, rise: Ints, block_size: int) -> Iterator[JobItem]:
    """Under a window: the rows of each request in each group, with the ranges of its first row as reference."""
    uses, blocks, lo, hi = _uses(part), part.blocks.numpy(), part.lo.numpy(), part.hi.numpy()
    for group, request, start, end in zip(uses.group, uses.request, uses.rows_start, uses.rows_end, strict=True):
        columns = slice(part.groups[group].block_lo, part.groups[group].block_hi)
        its_lo, its_hi = lo[request, columns].astype(np.int64), np.minimum(hi[request, columns], block_size)
        seen = np.flatnonzero(its_hi > np.maximum(its_lo, 0))
        if len(seen):
            its_lo = its_lo[seen]
            ranges = _ranges(blocks[columns][seen], its_lo, its_hi[seen], None, np.maximum(-its_lo, 0))
            yield JobItem(uses.rows[start:end], ranges, NO_CAUSAL, rise[uses.rows[start:end]].astype(np.int64))


def _shared_items(part: SharedPart, block_size: int) -> Iterator[JobItem]:
    """Makes items of the rows of each group by the tokens that they see; mostly all rows see the same.

    A step of prompt chunks or verifications has a group for each request, so all groups are looked at together.
    """
    uses = _uses(part)
    if not len(uses.group):
        return
    seen = _seen(part, uses, block_size)
    alike = _first_alike(uses, seen)
    of_rows = alike.repeat(uses.rows_end - uses.rows_start)
    order = _by_owner(of_rows)
    items, starts, stops = zip(*_runs(of_rows[order]), strict=True)
    rows = uses.rows[order]
    chosen = np.zeros(len(alike), bool)
    chosen[list(items)] = True
    visible = np.flatnonzero(chosen.repeat(seen.width) & (seen.hi > seen.lo))
    blocks = part.blocks.numpy()[seen.column[visible]]
    ranges = _ranges(blocks, seen.lo[visible], seen.hi[visible], positions=seen.position[visible])
    ends = np.searchsorted(visible, seen.end[list(items)]).tolist()
    for start, stop, first, last in zip(starts, stops, [0, *ends], ends, strict=False):
        if last > first:
            yield JobItem(rows[start:stop], ranges[first:last])


class _Uses(NamedTuple):
    """Runs of rows of a group with one request index. Rows of all groups follow one another.

    group: [uses] index of the group. request: [uses], index of `lo` and `hi`. rows_start, rows_end: [uses] in `rows`.
    """

    group: Ints
    request: Ints
    rows: Ints
    rows_start: Ints
    rows_end: Ints


class _Seen(NamedTuple):
    """The tokens of its group's blocks that the rows of each use see, use by use; the range is 0 to 0 if they see none.

    column, lo, hi, position: [entries]. width, end: [uses] how many entries each has, and where they end.
    """

    column: Ints
    lo: Ints
    hi: Ints
    position: Ints
    width: Ints
    end: Ints


def _uses(part: SharedPart) -> _Uses:
    groups = [index for index, group in enumerate(part.groups) if len(group.rows) and group.block_hi > group.block_lo]
    if not groups:
        return _Uses(*[np.zeros(0, np.int64)] * 5)
    rows = np.concatenate([part.groups[index].rows.numpy() for index in groups])
    of_group = np.array(groups).repeat([len(part.groups[index].rows) for index in groups])
    requests = part.row_spans.numpy()[rows]
    starts = np.flatnonzero(np.append(True, (requests[1:] != requests[:-1]) | (of_group[1:] != of_group[:-1])))
    return _Uses(of_group[starts], requests[starts], rows, starts, np.append(starts[1:], len(rows)))


def _seen(part: SharedPart, uses: _Uses, block_size: int) -> _Seen:
    bounds = np.array([(group.block_lo, group.block_hi) for group in part.groups])[uses.group]
    width = bounds[:, 1] - bounds[:, 0]
    end = width.cumsum()
    column = (bounds[:, 0] - (end - width)).repeat(width) + np.arange(end[-1])
    place = (uses.request * len(part.blocks)).repeat(width) + column
    signed = part.lo.numpy().take(place)
    lo, hi = np.maximum(signed, 0), np.minimum(part.hi.numpy().take(place), block_size)
    empty = hi <= lo
    lo[empty], hi[empty], signed[empty] = 0, 0, 0
    return _Seen(column, lo, hi, np.maximum(-signed, 0), width, end)


def _first_alike(uses: _Uses, seen: _Seen) -> Ints:
    """Returns [uses], the first use of the group whose rows see the same."""
    index = np.arange(len(uses.group))
    head = index[np.append(True, uses.group[1:] != uses.group[:-1])]
    alike = head.repeat(np.diff(head, append=len(index)))
    if len(head) == len(index):
        return alike
    start = seen.end - seen.width
    first = np.arange(seen.end[-1]) - (start - start[alike]).repeat(seen.width)
    other = (seen.lo != seen.lo[first]) | (seen.hi != seen.hi[first]) | (seen.position != seen.position[first])
    differs = np.logical_or.reduceat(other, start)
    known: dict[tuple[int, bytes], int] = {}
    for use in differs.nonzero()[0].tolist():
        entries = slice(start[use], seen.end[use])
        of_use = np.stack((seen.lo[entries], seen.hi[entries], seen.position[entries]))
        what = (int(alike[use]), of_use.tobytes())
        alike[use] = known.setdefault(what, use)
    return alike


def _unique_items(part: UniquePart, block_size: int) -> Iterator[JobItem]:
    """One item per single row."""
    rows = part.rows.numpy()
    blocks = np.arange(len(rows)) if part.blocks is None else part.blocks.numpy()
    signed = part.lo.numpy()
    lo, hi = np.maximum(signed, 0), np.minimum(part.hi.numpy(), block_size)
    chosen = (hi > lo).nonzero()[0]
    chosen = chosen[_by_owner(rows[chosen])]
    ranges = _ranges(blocks[chosen], lo[chosen], hi[chosen], positions=np.maximum(-signed[chosen], 0))
    for row, first, stop in _runs(rows[chosen]):
        yield JobItem(np.array([row]), ranges[first:stop])


def _selected_items(part: SelectedPart, block_size: int) -> Iterator[JobItem]:
    """One item per request that has rows and blocks; the blocks are named by their entries."""
    owners, hi = part.spans.numpy(), np.minimum(part.hi.numpy(), block_size)
    first_rows, num_rows = part.first_rows.numpy(), part.num_rows.numpy()
    entries = np.flatnonzero((hi > 0) & (num_rows[owners] > 0))
    entries = entries[_by_owner(owners[entries])]
    ranges = _ranges(part.blocks.numpy()[entries], np.zeros_like(entries), hi[entries], entries)
    for owner, first, stop in _runs(owners[entries]):
        yield JobItem(np.arange(first_rows[owner], first_rows[owner] + num_rows[owner]), ranges[first:stop])


def _ranges(
    blocks: Ints, lo: Ints, hi: Ints, entries: Ints | None = None, positions: NDArray[np.integer] | None = None
) -> Ints:
    found = np.zeros((len(blocks), RANGE_SIZE), np.int64)
    found[:, 0], found[:, 1], found[:, 2] = blocks, lo, hi
    found[:, 3] = NO_ENTRY if entries is None else entries
    if positions is not None:
        found[:, 4] = positions
    return found


def _by_owner(owners: Ints) -> Ints | slice:
    """Returns indices that sort these non-negative numbers, stably."""
    if (owners[1:] >= owners[:-1]).all():
        return slice(None)
    # numpy sorts numbers of 16 bits by their digits, six times as fast
    small = owners.max() <= np.iinfo(np.uint16).max
    return np.argsort(owners.astype(np.uint16) if small else owners, kind="stable")


def _runs(owners: Ints) -> Iterator[tuple[int, int, int]]:
    """Returns each owner in a sorted array, and its range."""
    if len(owners):
        starts = [0, *((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist()]
        yield from zip(owners[starts].tolist(), starts, [*starts[1:], len(owners)], strict=True)


# Rows of a job: keys are prepared once per tile of them, and the jobs of a step have to keep all cores busy. With many
# new rows there are enough jobs of twice the size.
ROW_TILE = 64
MANY_ROWS = 1024
# Cached tokens of a job: a long context is split among cores, and its partial results are merged.
TOKEN_TILE = 1024
TOKENS_UNCUT = TOKEN_TILE + TOKEN_TILE // 2


@dataclass
class Jobs:
    """Jobs as int64 tables, in the layout of source/attention_job.h.

    jobs: [jobs, 6] row_lo, row_hi, range_lo, range_hi, causal_first, is_local; the most expensive first.
    rows: [..., 5] row, partial, skip, first_new, position. ranges: [..., 5] block, lo, hi, entry, position; positions
        are for layers with slopes.
    merges: [..., 3] row, partial_lo, partial_hi.
    A range of the selected part names the entry whose block it reads; others have -1.
    partials: the number of partial results.
    """

    jobs: Ints
    rows: Ints
    ranges: Ints
    merges: Ints
    partials: int
    _empty: dict[int, Ints] = field(default_factory=dict)

    def empty_rows(self, rows: int) -> Ints:
        """Returns the rows below `rows` without a job: they see no token. The array lives as long as the jobs."""
        if rows not in self._empty:
            seen = np.zeros(rows, bool)
            seen[self.rows[:, 0]] = True
            self._empty[rows] = (~seen).nonzero()[0]
        return self._empty[rows]


def make_jobs(parts: AttentionParts, block_size: int) -> Jobs:
    """Makes the jobs of a step; each visible (row, token) pair is in exactly one of them."""
    size = row_tile(0 if parts.causal is None else int((parts.causal.groups >= 0).sum()))
    tiles = [tile for item in make_items(parts, block_size) for tile in _tiles(item, size, block_size)]
    return _tables(tiles, None if parts.positions is None else parts.positions.numpy())


@dataclass
class JobTile:
    """A job: rows, and token ranges. Row i does not see the first `skip[i]` tokens, nor new tokens before
    `first_new[i]`; both None: it sees all.
    """

    rows: Ints
    ranges: Ints
    causal_first: int = NO_CAUSAL
    skip: Ints | None = None
    first_new: Ints | None = None


def row_tile(chunk_rows: int) -> int:
    """Returns the most rows per job in a step with this many rows of prompt chunks."""
    return ROW_TILE * 2 if chunk_rows >= MANY_ROWS else ROW_TILE


def _tiles(item: JobItem, size: int, block_size: int) -> Iterator[JobTile]:
    """Cuts an item into tiles of this many rows; few rows with a long context are cut by tokens too."""
    if item.rise is not None:
        # in the order of positions, so that the tokens that a row does not see come first
        item.ranges = item.ranges[np.argsort(-item.ranges[:, 1], kind="stable")]
    for first in range(0, len(item.rows), size):
        chosen = slice(first, first + size)
        rows, ranges, skip, first_new = item.rows[chosen], item.ranges, None, None
        if item.rise is not None:
            ranges, skip = _from_first_row(ranges, item.rise[chosen])
        causal_first = item.causal_first
        if item.first_rows is not None:
            first_new = item.first_rows[chosen]
            causal_first = max(causal_first, int(first_new[0]))
        pieces = [ranges] if len(item.rows) > size else _pieces(ranges, block_size)
        for piece in pieces:
            if len(piece) or causal_first != NO_CAUSAL:
                yield JobTile(rows, piece, causal_first, skip, first_new)
            causal_first, first_new = NO_CAUSAL, None
            if skip is not None:
                skip = np.maximum(skip - (piece[:, 2] - piece[:, 1]).sum(), 0)


def _from_first_row(ranges: Ints, rise: Ints) -> tuple[Ints, Ints | None]:
    """The ranges [lo, hi) that the first row sees, and [rows] how many of their first tokens each row does not see."""
    lo = np.maximum(ranges[:, 1] + rise[0], 0)
    seen = ranges[:, 2] > lo
    signed, lo, ranges = ranges[seen, 1], lo[seen], ranges[seen]
    hidden = np.clip(signed + rise[:, None], lo, ranges[:, 2]) - lo
    skip = hidden.sum(axis=1)
    ranges[:, 1] = lo
    return ranges, skip if skip.any() else None


def _pieces(ranges: Ints, block_size: int) -> list[Ints]:
    if len(ranges) * block_size <= TOKENS_UNCUT:
        return [ranges]
    ends = (ranges[:, 2] - ranges[:, 1]).cumsum()
    if ends[-1] <= TOKENS_UNCUT:
        return [ranges]
    tiles = ends // TOKEN_TILE
    cuts = ((tiles[1:] != tiles[:-1]).nonzero()[0] + 1).tolist()
    return [ranges[first:last] for first, last in zip([0, *cuts], [*cuts, len(ranges)], strict=True)]


def _tables(tiles: list[JobTile], positions: Ints | None) -> Jobs:
    tiles = [tiles[index] for index in (-_costs(tiles)).argsort(kind="stable").tolist()]
    rows = np.concatenate([tile.rows for tile in tiles]) if tiles else np.zeros(0, np.int64)
    partial, merges = _partials(rows)
    jobs = np.zeros((len(tiles), 6), np.int64)
    jobs[:, 1] = list(accumulate(len(tile.rows) for tile in tiles))
    jobs[:, 3] = list(accumulate(len(tile.ranges) for tile in tiles))
    jobs[1:, 0], jobs[1:, 2] = jobs[:-1, 1], jobs[:-1, 3]
    jobs[:, 4] = [tile.causal_first for tile in tiles]
    table = np.zeros((len(rows), 5), np.int64)
    table[:, 0], table[:, 1] = rows, partial
    if positions is not None:
        table[:, 4] = positions[rows]
    for index, tile in enumerate(tiles):
        for column, values in ((2, tile.skip), (3, tile.first_new)):
            if values is not None:
                jobs[index, 5] = 1
                table[jobs[index, 0] : jobs[index, 1], column] = values
    ranges = np.concatenate([tile.ranges for tile in tiles]) if tiles else np.zeros((0, RANGE_SIZE))
    return Jobs(jobs, table, np.ascontiguousarray(ranges, np.int64), merges, int(partial.max(initial=-1)) + 1)


def _costs(tiles: list[JobTile]) -> Ints:
    """Estimates [tiles] the cost: rows times the tokens that they see, ignoring causality."""
    if not tiles:
        return np.zeros(0, np.int64)
    ranges = np.concatenate([tile.ranges for tile in tiles])
    seen = np.zeros(len(ranges) + 1, np.int64)
    (ranges[:, 2] - ranges[:, 1]).cumsum(out=seen[1:])
    seen = seen[np.array([0, *accumulate([len(tile.ranges) for tile in tiles])])]
    new = [0 if tile.causal_first == NO_CAUSAL else int(tile.rows[-1]) - tile.causal_first + 1 for tile in tiles]
    return np.array([len(tile.rows) for tile in tiles], np.int64) * (seen[1:] - seen[:-1] + np.array(new, np.int64))


def _partials(rows: Ints) -> tuple[Ints, Ints]:
    """Returns the partial result of each entry, or -1 if its row has no other entry; and the rows to merge."""
    partial = np.full(len(rows), -1, np.int64)
    if not len(rows) or np.bincount(rows).max() == 1:
        return partial, np.zeros((0, 3), np.int64)
    owners, which, counts = np.unique(rows, return_inverse=True, return_counts=True)
    several = counts > 1
    ends = np.cumsum(np.where(several, counts, 0))
    starts = ends - np.where(several, counts, 0)
    order = np.argsort(which.reshape(-1), kind="stable")
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    partial[order] = np.where(several, starts, -1)[which.reshape(-1)[order]]
    partial[order] += np.where(partial[order] >= 0, place, 0)
    return partial, np.stack((owners[several], starts[several], ends[several]), 1).astype(np.int64)
