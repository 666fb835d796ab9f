"""Blocks that the rows of one request alone use: each is read once for a tile of these rows, by a list of blocks."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import LOWEST, list_of, share_of, softmax_step


@triton.jit(do_not_specialize=["num_spans", "num_columns", "lo_span", "hi_span"])
def divide_columns(
    lo,
    hi,
    users,
    common_hi,
    num_spans,
    num_columns,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    BLOCK_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS shared blocks per program. lo, hi: as in SharedPart.

    users: int32 [num_columns] number of spans that see a token of the block. common_hi: int32 [num_spans, num_columns]
    is hi if there are several, and 0 where a block is one span's own.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    count = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_spans, SPANS):
        span = (first + tl.arange(0, SPANS)).to(tl.int64)
        mask = (span < num_spans)[:, None] & inside[None, :]
        begin = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
        end = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
        seen = mask & (tl.minimum(end, BLOCK_SIZE) > tl.maximum(begin, 0))
        count += tl.sum(seen.to(tl.int32), 0)
    tl.store(users + column, count, mask=inside)
    for first in range(0, num_spans, SPANS):
        span = (first + tl.arange(0, SPANS)).to(tl.int64)
        mask = (span < num_spans)[:, None] & inside[None, :]
        end = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
        end = tl.where((count > 1)[None, :], end, 0)
        tl.store(common_hi + span[:, None] * num_columns + column[None, :], end.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["whole_counts", "row_counts", "num_columns", "rows", "lo_span", "hi_span"])
def list_own(
    blocks,
    row_spans,
    lo,
    hi,
    users,
    columns,
    column_blocks,
    counts,
    whole_counts,
    row_counts,
    num_columns,
    rows,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One span per program. blocks, row_spans, lo, hi: as in SharedPart; users: see `divide_columns`.

    columns, column_blocks: int32 [spans, num_columns]: the first `counts[span]` are written, its own blocks, and the
    first `whole_counts[span]` of these are seen completely. row_counts: int32 [spans] rows of the span.
    """
    span = tl.program_id(0).to(tl.int64)
    lists = span * num_columns
    found = 0
    whole_found = 0
    for partly in tl.static_range(2):
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_columns
            begin = tl.load(lo + span * lo_span + column * lo_column, mask=inside, other=0)
            end = tl.load(hi + span * hi_span + column * hi_column, mask=inside, other=0)
            begin, end = tl.maximum(begin, 0), tl.minimum(end, BLOCK_SIZE)
            alone = tl.load(users + column, mask=inside, other=0) == 1
            whole = end - begin == BLOCK_SIZE
            taken = (alone & (end > begin) & (whole == (partly == 0))).to(tl.int32)
            place = found + tl.cumsum(taken, 0) - taken
            block = tl.load(blocks + column, mask=inside, other=0).to(tl.int32)
            tl.store(columns + lists + place, column, mask=taken > 0)
            tl.store(column_blocks + lists + place, block, mask=taken > 0)
            found += tl.sum(taken, 0)
        if partly == 0:
            whole_found = found
    tl.store(counts + span, found)
    tl.store(whole_counts + span, whole_found)
    its_rows = tl.zeros([STEP], tl.int32)
    for first in range(0, rows, STEP):
        row = first + tl.arange(0, STEP)
        its_rows += (tl.load(row_spans + row, mask=row < rows, other=-1) == span).to(tl.int32)
    tl.store(row_counts + span, tl.sum(its_rows, 0))


@triton.jit(do_not_specialize=["row_counts", "num_spans", "rows", "most_tiles"])
def place_own(
    row_spans,
    counts,
    row_counts,
    order,
    place,
    tile_spans,
    offsets,
    num_spans,
    rows,
    most_tiles,
    ROWS: tl.constexpr,
    TAKEN: tl.constexpr,
    STEP: tl.constexpr,
):
    """TAKEN rows per program. row_spans: as in SharedPart; counts, row_counts: see `list_own`.

    The rows of a span with own blocks go into tiles of ROWS, wherever they are in the step. order: int32
    [most_tiles * ROWS] the row of each place; place: int32 [rows] the inverse, or -1; tile_spans: int32 [most_tiles];
    offsets: int32 [most_tiles + 1] of the blocks that each tile uses. Entries of `order` and `tile_spans` without a row
    are not written.
    """
    row = tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)
    there = row < rows
    span = tl.load(row_spans + row, mask=there, other=-1).to(tl.int32)
    before = tl.zeros([TAKEN], tl.int32)  # rows of the same span
    for first in range(0, tl.minimum(rows, (tl.program_id(0) + 1) * TAKEN), STEP):
        other = first + tl.arange(0, STEP)
        others = tl.load(row_spans + other, mask=other < rows, other=-2).to(tl.int32)
        same = (others[None, :] == span[:, None]) & (other[None, :] < row[:, None])
        before += tl.sum(same.to(tl.int32), 1)
    tile = before // ROWS
    pair = tl.zeros([TAKEN], tl.int32)
    all_tiles = 0
    all_pairs = 0
    for first in range(0, num_spans, STEP):
        other = first + tl.arange(0, STEP)
        count = tl.load(counts + other, mask=other < num_spans, other=0)
        tiles = tl.load(row_counts + other, mask=other < num_spans, other=0)
        tiles = tl.where(count > 0, (tiles + ROWS - 1) // ROWS, 0)
        earlier = other[None, :] < span[:, None]
        tile += tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
        pair += tl.sum(tl.where(earlier, (tiles * count)[None, :], 0), 1)
        all_tiles += tl.sum(tiles, 0)
        all_pairs += tl.sum(tiles * count, 0)
    count = tl.load(counts + span, mask=there, other=0)
    owns = count > 0
    lane = before % ROWS
    tl.store(place + row, tl.where(owns, tile * ROWS + lane, -1), mask=there)
    tl.store(order + tile * ROWS + lane, row, mask=owns)
    begins = owns & (lane == 0)
    tl.store(tile_spans + tile, span, mask=begins)
    tl.store(offsets + tile, pair + before // ROWS * count, mask=begins)
    if tl.program_id(0) == 0:
        for first in range(all_tiles, most_tiles + 1, STEP):
            rest = first + tl.arange(0, STEP)
            tl.store(offsets + rest, all_pairs + tl.zeros([STEP], tl.int32), mask=rest <= most_tiles)


@triton.jit
def _turned(entry, turn, count):
    """Returns the entry of a list of `count` that starts at `turn` and wraps around; turn is 0 or less than count."""
    place = entry + turn
    return tl.where((turn > 0) & (place >= count), place - count, place)


@triton.jit(do_not_specialize=["whole_counts", "num_tiles", "num_columns", "lo_span", "hi_span"])
def attend_own(
    query,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    order,
    tile_spans,
    lo,
    hi,
    columns,
    column_blocks,
    whole_counts,
    offsets,
    acc_out,
    top_out,
    total_out,
    scale,
    num_tiles,
    num_columns,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (KV heads, programs): each program takes an even share of the (tile, block) pairs.

    order: int32 [tiles * ROWS] rows, or -1; tile_spans: int32 [tiles] the span of all rows of a tile.
    columns, column_blocks, whole_counts: see `list_own`; offsets: int32 [tiles + 1] of the counts of their spans. The
    other arguments are as in `attend_shared`. All rows of a tile see the same tokens, and only these are loaded, so no
    second check is needed.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    pairs = tl.load(offsets + num_tiles)
    position, end = share_of(program, tl.num_programs(1), pairs)
    share_begins = position
    m = tl.arange(0, BLOCK_M)
    lane, head = m // GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    tile = position
    if position < end:
        tile = list_of(offsets, num_tiles, position, LISTS)
    while position < end:
        begins = tl.load(offsets + tile)
        stop = tl.minimum(end, tl.load(offsets + tile + 1))
        if stop > position:
            row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
            real = row >= 0
            q = tl.load(
                query + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :],
                mask=real[:, None] & (d < DIM)[None, :],
                other=0.0,
            ).to(COMPUTE)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            span = tl.load(tile_spans + tile).to(tl.int64)
            lists = span * num_columns
            wholes = tl.load(whole_counts + span)
            whole = tl.minimum(begins + wholes, stop)
            # Programs that share no boundary of a tile would read the blocks of a request at different times, and each
            # from memory. A tile that is read in full begins where a program that began with a tile is by now.
            turn = 0
            if (position == begins) & (whole == begins + wholes) & (wholes > 0):
                turn = (position - share_begins) % wholes
            from_list = (position - begins) * BLOCK_SIZE
            whole_end = (whole - begins) * BLOCK_SIZE
            # The block of the next step is loaded in this one: the compiler counts a load that keys wait for as a
            # stage, so that they would be asked for a stage later.
            ahead = tl.load(column_blocks + lists + _turned(position - begins, turn, wholes))
            for first in tl.range(from_list, whole_end, BLOCK_N, num_stages=STAGES):
                if DESCRIBED:
                    block32, inner = ahead, first % BLOCK_SIZE
                    after = tl.minimum(first + BLOCK_N, whole_end - BLOCK_N)
                    ahead = tl.load(column_blocks + lists + _turned(after // BLOCK_SIZE, turn, wholes))
                    k = key_tiles.load([block32, kv_head, inner, 0]).reshape(BLOCK_N, BLOCK_D).to(COMPUTE)
                    v = value_tiles.load([block32, kv_head, inner, 0]).reshape(BLOCK_N, BLOCK_V).to(COMPUTE)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                else:
                    n = first + tl.arange(0, BLOCK_N)
                    inside = n < whole_end
                    token = n % BLOCK_SIZE
                    entry = _turned(n // BLOCK_SIZE, turn, wholes)
                    block = tl.load(column_blocks + lists + entry, mask=inside, other=0).to(tl.int64)
                    k = tl.load(
                        keys + (block * k_block + token * k_token)[:, None] + d[None, :],
                        mask=inside[:, None] & (d < DIM)[None, :],
                        other=0.0,
                    ).to(COMPUTE)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    scores = tl.where(inside[None, :], scores, float("-inf"))
                    v = tl.load(
                        values + (block * v_block + token * v_token)[:, None] + e[None, :],
                        mask=inside[:, None] & (e < VALUE_DIM)[None, :],
                        other=0.0,
                    ).to(COMPUTE)
                acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
            part_end = (stop - begins) * BLOCK_SIZE
            for first in tl.range(tl.maximum(from_list, whole_end), part_end, BLOCK_N, num_stages=1):
                n = first + tl.arange(0, BLOCK_N)
                inside = n < part_end
                token = n % BLOCK_SIZE
                column = tl.load(columns + lists + n // BLOCK_SIZE, mask=inside, other=0)
                block = tl.load(column_blocks + lists + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                lowest = tl.load(lo + span * lo_span + column * lo_column, mask=inside, other=0)
                highest = tl.load(hi + span * hi_span + column * hi_column, mask=inside, other=0)
                seen = inside & (token >= lowest) & (token < highest)
                k = tl.load(
                    keys + (block * k_block + token * k_token)[:, None] + d[None, :],
                    mask=seen[:, None] & (d < DIM)[None, :],
                    other=0.0,
                ).to(COMPUTE)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                v = tl.load(
                    values + (block * v_block + token * v_token)[:, None] + e[None, :],
                    mask=seen[:, None] & (e < VALUE_DIM)[None, :],
                    other=0.0,
                ).to(COMPUTE)
                acc, top, total = softmax_step(acc, top, total, scores, scale, v, COMPUTE, PRECISION, CAP)
            place = ((program + tile).to(tl.int64) * ROWS + lane) * HEADS + head
            tl.store(top_out + place, top, mask=real)
            tl.store(total_out + place, total, mask=real)
            tl.store(
                acc_out + place[:, None] * VALUE_DIM + e[None, :], acc, mask=real[:, None] & (e < VALUE_DIM)[None, :]
            )
            position = stop
        tile += 1
