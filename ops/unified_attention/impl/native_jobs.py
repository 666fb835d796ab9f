"""The parts of a step as jobs of the C++ kernel: which rows see which tokens, and where partial results go.

A job is a tile of rows that see the same cached tokens; rows of a prompt chunk also see the chunk's tokens before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from vllm_gaudi_ucm.ops.unified_attention.impl.native_items import NO_CAUSAL, Ints, Item, make_items
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

# Rows of a job: keys are prepared once per tile of them, and the jobs of a step have to keep all cores busy. Where
# there are many new rows there are enough jobs of twice the size.
ROW_TILE = 64
MANY_ROWS = 1024
# Cached tokens of a job: a long context is split among cores, and its partial results are merged.
TOKEN_TILE = 1024


@dataclass
class Jobs:
    """int64 tables as source/attention_job.h reads them.

    jobs: [jobs, 5] row_lo, row_hi, span_lo, span_hi, causal_first; the most expensive first.
    rows: [..., 2] row, partial. spans: [..., 4] block, lo, hi, entry. merges: [..., 3] row, partial_lo, partial_hi.
    Spans of the selected part have the entry whose block they read, the others -1.
    partials: how many there are.
    """

    jobs: Ints
    rows: Ints
    spans: Ints
    merges: Ints
    partials: int
    _empty: dict[int, Ints] = field(default_factory=dict)

    def empty_rows(self, rows: int) -> Ints:
        """Rows among the first `rows` that no job has: they see nothing. The array lives as long as the jobs."""
        if rows not in self._empty:
            seen = np.zeros(rows, bool)
            seen[self.rows[:, 0]] = True
            self._empty[rows] = np.flatnonzero(~seen)
        return self._empty[rows]


def make_jobs(parts: AttentionParts, block_size: int) -> Jobs:
    """The jobs of a step; every (row, token) pair of the parts is in exactly one of them."""
    size = row_tile(0 if parts.causal is None else int((parts.causal.groups >= 0).sum()))
    return _tables([tile for item in make_items(parts, block_size) for tile in _tiles(item, size)])


def row_tile(chunk_rows: int) -> int:
    """Most rows of a job in a step with so many rows of prompt chunks."""
    return ROW_TILE * 2 if chunk_rows >= MANY_ROWS else ROW_TILE


def _tiles(item: Item, size: int) -> Iterator[Item]:
    """Cuts an item into tiles of so many rows; few rows with a long context are cut by tokens too."""
    for first in range(0, len(item.rows), size):
        rows = item.rows[first : first + size]
        pieces = [item.spans] if len(item.rows) > size else _pieces(item.spans)
        yield Item(rows, pieces[0], item.causal_first)
        for spans in pieces[1:]:
            yield Item(rows, spans)


def _pieces(spans: Ints) -> list[Ints]:
    ends = np.cumsum(spans[:, 2] - spans[:, 1])
    if not len(ends) or ends[-1] <= TOKEN_TILE + TOKEN_TILE // 2:
        return [spans]
    tiles = ends // TOKEN_TILE
    cuts = ((tiles[1:] != tiles[:-1]).nonzero()[0] + 1).tolist()
    return [spans[first:last] for first, last in zip([0, *cuts], [*cuts, len(spans)], strict=True)]


def _tables(tiles: list[Item]) -> Jobs:
    tiles = [tiles[index] for index in np.argsort(-_costs(tiles), kind="stable").tolist()]
    rows = np.concatenate([tile.rows for tile in tiles]) if tiles else np.zeros(0, np.int64)
    partial, merges = _partials(rows)
    row_ends = np.cumsum([len(tile.rows) for tile in tiles], dtype=np.int64)
    span_ends = np.cumsum([len(tile.spans) for tile in tiles], dtype=np.int64)
    jobs = np.zeros((len(tiles), 5), np.int64)
    jobs[:, 1], jobs[:, 3] = row_ends, span_ends
    jobs[1:, 0], jobs[1:, 2] = row_ends[:-1], span_ends[:-1]
    jobs[:, 4] = [tile.causal_first for tile in tiles]
    spans = np.concatenate([tile.spans for tile in tiles]) if tiles else np.zeros((0, 4))
    return Jobs(
        jobs,
        np.stack((rows, partial), 1),
        np.ascontiguousarray(spans, np.int64),
        merges,
        int(partial.max(initial=-1)) + 1,
    )


def _costs(tiles: list[Item]) -> Ints:
    """[tiles] rows times the tokens that they see, where not causality leaves some out."""
    if not tiles:
        return np.zeros(0, np.int64)
    spans = np.concatenate([tile.spans for tile in tiles])
    seen = np.zeros(len(spans) + 1, np.int64)
    np.cumsum(spans[:, 2] - spans[:, 1], out=seen[1:])
    ends = np.cumsum([len(tile.spans) for tile in tiles])
    tokens = np.diff(seen[ends], prepend=0).astype(np.int64)
    new = [0 if tile.causal_first == NO_CAUSAL else int(tile.rows[-1]) - tile.causal_first + 1 for tile in tiles]
    return np.array([len(tile.rows) for tile in tiles], np.int64) * (tokens + np.array(new, np.int64))


def _partials(rows: Ints) -> tuple[Ints, Ints]:
    """Per entry its partial result, or -1 where its row has no other entry; and the rows to merge."""
    owners, which, counts = np.unique(rows, return_inverse=True, return_counts=True)
    several = counts > 1
    partial = np.full(len(rows), -1, np.int64)
    if not several.any():
        return partial, np.zeros((0, 3), np.int64)
    ends = np.cumsum(np.where(several, counts, 0))
    starts = ends - np.where(several, counts, 0)
    order = np.argsort(which.reshape(-1), kind="stable")
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    partial[order] = np.where(several, starts, -1)[which.reshape(-1)[order]]
    partial[order] += np.where(partial[order] >= 0, place, 0)
    return partial, np.stack((owners[several], starts[several], ends[several]), 1).astype(np.int64)
