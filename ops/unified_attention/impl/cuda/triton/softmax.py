"""Shared by all kernels: one step of the online softmax, and values that not every row of a tile may see.

Inside the kernels scores are in units of log2 (exp2 is one instruction), so tops are base-2 logarithms; nothing
outside these kernels reads them.
"""

import triton
import triton.language as tl

# Top of a row that has seen nothing: finite, for -inf - -inf would be NaN, and below every score.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_step(
    acc, top, total, scores, scale, value, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, bias=None
):
    """Adds a tile of keys to (acc, top, total): [rows, value_dim], [rows], [rows], all fp32; top is LOWEST at first.

    scores: fp32 [rows, keys], before scaling; -inf if a row does not see a key. scale: positive, times log2(e).
    CAP: of scores, times log2(e); 0: there is none. bias: fp32 [rows, keys], times log2(e), that scores are less by
    after the cap; None: by nothing.
    """
    if CAP > 0.0:
        # tanh(x) = 1 - 2 / (e^2x + 1); a key that is not seen stays so
        capped = CAP - 2.0 * CAP / (tl.exp2(scores * (scale * (2.8853900817779268 / CAP))) + 1.0)
        scores = tl.where(scores == float("-inf"), float("-inf"), capped)
        scale = 1.0
    if bias is not None:
        scores = scores * scale - bias
        scale = 1.0
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def without_garbage(value, visible, tainted):
    """The values with 0 instead of non-finite ones, and tainted [rows] set to 1 for rows that see such a token.

    Weight 0 times NaN is NaN: a token that only some rows of a tile see must not reach the others.
    """
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    broken = tl.max(tl.where(finite, 0, 1), 1)
    sees = tl.max(tl.where(visible, broken[None, :], 0), 1)
    return tl.where(finite, value, 0.0).to(value.dtype), tl.maximum(tainted, sees)


@triton.jit
def add_sink(acc, top, total, logit):
    """acc and total with one more term of the sum. logit: fp32, before log2(e); as many as tops, or one for all."""
    logit = logit * LOG2_E
    both = tl.maximum(tl.maximum(top, logit), LOWEST)
    shrink = tl.exp2(top - both)
    return acc * shrink[:, None], total * shrink + tl.exp2(logit - both)


@triton.jit
def finish(acc, total):
    """The normalised sums [rows, value_dim]; the whole row is NaN if any element of it is not finite.

    As in the reference, a token with one broken element is broken; the sums alone would show only that element.
    """
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    broken = tl.max(tl.where(tl.abs(result) < float("inf"), 0, 1), 1)
    return tl.where(broken[:, None] > 0, float("nan"), result)


@triton.jit
def list_of(offsets, num_lists, position, LISTS: tl.constexpr):
    """The list that holds entry `position`; offsets: [num_lists + 1] the start of each list, and the end."""
    index = tl.arange(0, LISTS)
    ends = tl.load(offsets + 1 + index, mask=index < num_lists, other=2147483647)
    return tl.sum(tl.where(ends <= position, 1, 0), 0)


@triton.jit
def share_of(program, programs, entries):
    """Returns the first entry and the end of the even share of a program. At most as many programs as entries get a
    share, so that no idle program lies between two others: the merge would read a result that was never written.
    """
    sharing = tl.minimum(programs, entries)
    if program < sharing:
        first = (program.to(tl.int64) * entries // sharing).to(tl.int32)
        end = ((program + 1).to(tl.int64) * entries // sharing).to(tl.int32)
    else:
        first = entries
        end = entries
    return first, end


@triton.jit
def find_tokens(first, stop, blocks, lo, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Finds tokens [first, first + BLOCK_N) of a list that ends before entry `stop`: block, offset in it, and whether
    it is seen. Each is [BLOCK_N], but a single block if all tokens are in one. blocks: int64, lo, hi: int32 [entries].
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        entry = first // BLOCK_SIZE
        token = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        seen = (token >= tl.load(lo + entry)) & (token < tl.load(hi + entry))
        block = tl.load(blocks + entry)
    else:
        entry = (first + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
        token = (first + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        inside = entry < stop
        lowest = tl.load(lo + entry, mask=inside, other=0)
        seen = (token >= lowest) & (token < tl.load(hi + entry, mask=inside, other=0))
        block = tl.load(blocks + entry, mask=inside, other=0)
    return block, token, seen


@triton.jit
def token_positions(first, stop, lo, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns [BLOCK_N] the positions in their request of the tokens that `find_tokens` finds. Under slopes, `lo` is
    the start of the request relative to the block's first token.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return first % BLOCK_SIZE + tl.arange(0, BLOCK_N) - tl.load(lo + first // BLOCK_SIZE)
    else:
        n = first + tl.arange(0, BLOCK_N)
        return n % BLOCK_SIZE - tl.load(lo + n // BLOCK_SIZE, mask=n // BLOCK_SIZE < stop, other=0)


@triton.jit(do_not_specialize=["whole_counts", "num_columns", "lo_span", "hi_span"])
def list_columns(
    order,
    row_spans,
    blocks,
    lo,
    hi,
    columns,
    column_blocks,
    counts,
    whole_counts,
    rise,
    num_columns,
    lo_span,
    lo_column,
    hi_span,
    hi_column,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    RISES: tl.constexpr,
):
    """One tile per program. order: int32 [tiles * ROWS] rows, or -1; row_spans, blocks, lo, hi as in SharedPart, and
    rise if RISES.

    columns, column_blocks: int32 [tiles, num_columns]: the first `counts[tile]` are written, and all rows see the first
    `whole_counts[tile]` of these completely.
    """
    tile = tl.program_id(0)
    lane = tl.arange(0, ROWS_PAD)
    row = tl.load(order + tile * ROWS + lane, mask=lane < ROWS, other=-1)
    real = row >= 0
    span = tl.load(row_spans + row, mask=real, other=0).to(tl.int64)
    lists = tile.to(tl.int64) * num_columns
    found = 0
    whole_found = 0
    for partly in tl.static_range(2):
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_columns
            mask = real[:, None] & inside[None, :]
            begin = tl.load(lo + span[:, None] * lo_span + column[None, :] * lo_column, mask=mask, other=0)
            if RISES:
                begin += tl.load(rise + row, mask=real, other=0).to(tl.int32)[:, None]
            end = tl.load(hi + span[:, None] * hi_span + column[None, :] * hi_column, mask=mask, other=0)
            begin, end = tl.maximum(begin, 0), tl.minimum(end, BLOCK_SIZE)
            seen = tl.max(tl.where(mask & (end > begin), 1, 0), 0)
            whole = tl.min(tl.where(real[:, None] & ((begin > 0) | (end < BLOCK_SIZE)), 0, 1), 0)
            taken = seen * (1 - whole) if partly else seen * whole
            place = found + tl.cumsum(taken, 0) - taken
            block = tl.load(blocks + column, mask=inside, other=0).to(tl.int32)
            keep = inside & (taken > 0)
            tl.store(columns + lists + place, column, mask=keep)
            tl.store(column_blocks + lists + place, block, mask=keep)
            found += tl.sum(taken, 0)
        if partly == 0:
            whole_found = found
    tl.store(counts + tile, found)
    tl.store(whole_counts + tile, whole_found)


@triton.jit(do_not_specialize=["num_spans"])
def attend_rows(
    query,
    key_cache,
    value_cache,
    blocks,
    lo,
    hi,
    offsets,
    out,
    sinks,
    scale,
    num_spans,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    o_row,
    o_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (rows, KV heads); arguments as in `attend_spans`; span i is row i. Rows without blocks become zeros.

    sinks: fp32 [heads], read if SINKS.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    begin = tl.load(offsets + tl.minimum(row, num_spans))
    end = tl.load(offsets + tl.minimum(row + 1, num_spans))
    m = tl.arange(0, BLOCK_M)
    real, head = m < GROUP, kv_head * GROUP + m % GROUP
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = key_cache + kv_head.to(tl.int64) * k_head
    values = value_cache + kv_head.to(tl.int64) * v_head
    q = tl.load(
        query + row.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :],
        mask=real[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(COMPUTE)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(begin * BLOCK_SIZE, end * BLOCK_SIZE, BLOCK_N, num_stages=STAGES):
        block, token, seen = find_tokens(first, end, blocks, lo, hi, BLOCK_SIZE, BLOCK_N)
        k_place = block * k_block + token * k_token
        v_place = block * v_block + token * v_token
        k = tl.load(keys + k_place[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.load(values + v_place[:, None] + e[None, :], mask=seen[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, scale, v.to(COMPUTE), COMPUTE, PRECISION, CAP)
    if SINKS:
        acc, total = add_sink(acc, top, total, tl.load(sinks + head, mask=real, other=0.0))
    result = finish(acc, total)
    tl.store(
        out + row.to(tl.int64) * o_row + head[:, None] * o_head + e[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (e < VALUE_DIM)[None, :],
    )
