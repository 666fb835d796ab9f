"""Scores of the tokens that rows see, one kernel for each part. A score is `sum_h weight_h * relu(query_h . key)`.

Scores are a table, float32 [rows of a tile, columns], filled with -inf in advance. A row has its shared blocks first,
then its unique blocks, each at its place among the row's blocks, and then new tokens. `table`, int32 [rows, blocks of a
row], names the block at each place.
"""

import triton
import triton.language as tl


@triton.jit
def _load_keys(places, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr):
    """Loads keys at pointers `places` [tokens]: [tokens, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < DIM)[None, :]
    return tl.load(places[:, None] + d[None, :], mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _scores_of_row(
    query,
    weights,
    row,
    keys,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Returns float32 [tokens] for keys [tokens, BLOCK_D]."""
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (h < HEADS)[:, None] & (d < DIM)[None, :]
    places = query + row.to(tl.int64) * HEADS * DIM + h[:, None] * DIM + d[None, :]
    q = tl.load(places, mask=mask, other=0.0).to(COMPUTE)
    weight = tl.load(weights + row.to(tl.int64) * HEADS + h, mask=h < HEADS, other=0.0)
    products = tl.dot(keys, tl.trans(q), input_precision="ieee")
    return tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_place", "num_places", "width"])
def score_unique(
    query,
    weights,
    keys,
    blocks,
    owners,
    lo,
    hi,
    places,
    scores,
    table,
    first_row,
    num_rows,
    first_place,
    num_places,
    width,
    k_slot,
    lo_entry,
    hi_entry,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """A program for each entry of a `UniquePart`; entries of rows outside of the tile are skipped.

    SLICE: entry b is block b. first_place, num_places: where unique blocks begin in `table`, and its columns.
    """
    entry = tl.program_id(0)
    row = tl.load(owners + entry).to(tl.int32)
    low = tl.maximum(tl.load(lo + entry * lo_entry), 0).to(tl.int32)
    high = tl.load(hi + entry * hi_entry).to(tl.int32)
    own = row - first_row
    if (high > low) & (own >= 0) & (own < num_rows):
        block = entry.to(tl.int64) if SLICE else tl.load(blocks + entry).to(tl.int64)
        place = first_place + tl.load(places + entry).to(tl.int32)
        t = tl.arange(0, BLOCK_T)
        seen = (t >= low) & (t < high) & (t < SIZE)
        loaded = _load_keys(keys + (block * SIZE + t) * k_slot, seen, DIM, BLOCK_D, COMPUTE)
        found = _scores_of_row(query, weights, row, loaded, HEADS, DIM, BLOCK_H, BLOCK_D, COMPUTE)
        tl.store(scores + own.to(tl.int64) * width + place * SIZE + t, found, mask=seen)
        tl.store(table + own.to(tl.int64) * num_places + place, block.to(tl.int32))


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_places", "width", "lo_span", "hi_span", "place_span"])
def score_shared(
    query,
    weights,
    keys,
    blocks,
    row_spans,
    lo,
    hi,
    places,
    scores,
    table,
    first_row,
    num_rows,
    num_places,
    width,
    k_slot,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    place_span,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid (shared blocks, tiles of ROWS rows). A block that no row of the tile sees costs a look at its ranges.

    places: int32 [spans, shared blocks], of each block among those that the span sees.
    """
    column = tl.program_id(0)
    begin = tl.program_id(1) * ROWS
    r = begin + tl.arange(0, ROWS)
    spans = tl.load(row_spans + first_row + r, mask=r < num_rows, other=0).to(tl.int64)
    lows = tl.maximum(tl.load(lo + spans * lo_span + column * lo_column), 0)
    highs = tl.load(hi + spans * hi_span + column * hi_column)
    if tl.max(((highs > lows) & (r < num_rows)).to(tl.int32), 0) > 0:
        block = tl.load(blocks + column).to(tl.int64)
        t = tl.arange(0, BLOCK_T)
        loaded = _load_keys(keys + (block * SIZE + t) * k_slot, t < SIZE, DIM, BLOCK_D, COMPUTE)
        for i in range(ROWS):
            own = begin + i
            is_row = own < num_rows
            span = tl.load(row_spans + first_row + own, mask=is_row, other=0).to(tl.int64)
            low = tl.maximum(tl.load(lo + span * lo_span + column * lo_column), 0)
            high = tl.load(hi + span * hi_span + column * hi_column)
            if is_row & (high > low):
                place = tl.load(places + span * place_span + column)
                seen = (t >= low) & (t < high) & (t < SIZE)
                found = _scores_of_row(query, weights, first_row + own, loaded, HEADS, DIM, BLOCK_H, BLOCK_D, COMPUTE)
                at = own.to(tl.int64)
                tl.store(scores + at * width + place * SIZE + t, found, mask=seen)
                tl.store(table + at * num_places + place, block.to(tl.int32))


@triton.jit(do_not_specialize=["first_row", "num_rows", "begin", "first_column", "width", "k_row"])
def score_new(
    query,
    weights,
    keys,
    groups,
    scores,
    first_row,
    num_rows,
    begin,
    first_column,
    width,
    k_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid (tiles of BLOCK_T new tokens, tiles of ROWS rows). begin: the first new token that has a column.

    keys: [rows of the step, DIM]. groups: see `CausalPart`.
    """
    tile = tl.program_id(1) * ROWS
    end = first_row + tl.minimum(tile + ROWS, num_rows)
    t = begin + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    if begin + tl.program_id(0) * BLOCK_T < end:
        group = tl.load(groups + t, mask=t < end, other=-1)
        loaded = _load_keys(keys + t.to(tl.int64) * k_row, t < end, DIM, BLOCK_D, COMPUTE)
        for i in range(ROWS):
            own = tile + i
            row = first_row + own
            mine = tl.load(groups + row, mask=own < num_rows, other=-1)
            seen = (group == mine) & (mine >= 0) & (t <= row)
            if tl.max(seen.to(tl.int32), 0) > 0:
                found = _scores_of_row(query, weights, row, loaded, HEADS, DIM, BLOCK_H, BLOCK_D, COMPUTE)
                tl.store(scores + own.to(tl.int64) * width + first_column + t - begin, found, mask=seen)
