"""The merge: adds the partial results of a row over all programs and parts, and divides once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import add_sink, finish

NOTHING_SEEN = tl.constexpr(-3.4028234663852886e38)  # as in `parts`


@triton.jit
def _add_list(
    acc,
    top,
    total,
    place,
    found_acc,
    found_top,
    found_total,
    offsets,
    num_lists,
    programs,
    units,
    row,
    head,
    real,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Adds the pieces of a row's list to the sums of some heads: acc [heads, value_dim], top and total [heads]."""
    at = tl.load(place + row)
    if at >= 0:
        index, lane = at // ROWS, at % ROWS
        # of as many units as each entry has
        begin, end = tl.load(offsets + index).to(tl.int64) * units, tl.load(offsets + index + 1).to(tl.int64) * units
        entries = tl.load(offsets + num_lists).to(tl.int64) * units
        if end > begin:
            # the programs that hold the first and the last entry, see `share_of`
            sharing = tl.minimum(programs, entries)
            first, last = ((begin + 1) * sharing - 1) // entries, (end * sharing - 1) // entries
            e = tl.arange(0, BLOCK_V)
            for group in range(first, last + 1, PIECES):
                program = group + tl.arange(0, PIECES)
                there = (program <= last)[:, None] & real[None, :]
                slot = ((program[:, None] + index) * ROWS + lane) * HEADS + head[None, :]
                tops = tl.load(found_top + slot, mask=there, other=float("-inf"))
                totals = tl.load(found_total + slot, mask=there, other=0.0)
                accs = tl.load(
                    found_acc + slot[:, :, None] * VALUE_DIM + e[None, None, :],
                    mask=there[:, :, None] & (e < VALUE_DIM)[None, None, :],
                    other=0.0,
                )
                new_top = tl.maximum(top, tl.max(tops, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink, weights = tl.exp2(top - base), tl.exp2(tops - base[None, :])
                total = total * shrink + tl.sum(totals * weights, 0)
                acc = acc * shrink[:, None] + tl.sum(accs * weights[:, :, None], 0)
                top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "u_lists",
        "u_programs",
        "u_units",
        "s_lists",
        "s_programs",
        "s_units",
        "c_lists",
        "c_programs",
        "c_units",
        "w_lists",
        "w_programs",
        "w_units",
    ]
)
def merge_parts(
    out,
    log_sums,
    starts,
    causal_acc,
    causal_top,
    causal_total,
    u_place,
    u_acc,
    u_top,
    u_total,
    u_offsets,
    u_lists,
    u_programs,
    u_units,
    s_place,
    s_acc,
    s_top,
    s_total,
    s_offsets,
    s_lists,
    s_programs,
    s_units,
    c_place,
    c_acc,
    c_top,
    c_total,
    c_offsets,
    c_lists,
    c_programs,
    c_units,
    w_place,
    w_acc,
    w_top,
    w_total,
    w_offsets,
    w_lists,
    w_programs,
    w_units,
    sinks,
    o_row,
    o_head,
    HEADS: tl.constexpr,
    S_ROWS: tl.constexpr,
    C_ROWS: tl.constexpr,
    W_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    SAVED: tl.constexpr,
    UNIQUE: tl.constexpr,
    SHARED: tl.constexpr,
    SELECTED: tl.constexpr,
    OWN: tl.constexpr,
    CONTINUED: tl.constexpr,
    PIECES: tl.constexpr,
    LOGS: tl.constexpr,
    EARLY: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row and BLOCK_H heads per program. u, s, c, w: partial results of the unique, shared, selected
    and own lists.

    place: int32 [rows] list * ROWS + lane of the row, or -1. Rows with only a causal part are already complete.
    EARLY: it starts before the part in use ends, and waits for it. LOGS: log_sums, fp32 [rows, HEADS], is written with
        natural logarithms of the sums.
    CAUSAL: there is a causal part. CONTINUED: its sums contain the own lists of its rows. SAVED: causal_acc,
        causal_top, causal_total hold its sums of rows with more parts. SINKS: sinks is fp32 [heads].
    """
    row = tl.program_id(0)
    at = -1
    if UNIQUE:
        at = tl.maximum(at, tl.load(u_place + row))
    if SHARED:
        at = tl.maximum(at, tl.load(s_place + row))
    if SELECTED:
        at = tl.maximum(at, tl.load(c_place + row))
    active = False
    if CAUSAL:
        active = tl.load(starts + row) <= row
    has_own = False
    if OWN:
        has_own = (tl.load(w_place + row) >= 0) & ((active == 0) | (not CONTINUED))
    if EARLY:
        gdc_wait()
    if (at >= 0) | has_own | (active == 0):
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        real = head < HEADS
        e = tl.arange(0, BLOCK_V)
        acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        if SAVED:
            if active:
                slot = row.to(tl.int64) * HEADS + head
                top = tl.load(causal_top + slot, mask=real, other=float("-inf"))
                total = tl.load(causal_total + slot, mask=real, other=0.0)
                acc = tl.load(
                    causal_acc + slot[:, None] * VALUE_DIM + e[None, :],
                    mask=real[:, None] & (e < VALUE_DIM)[None, :],
                    other=0.0,
                )
        if UNIQUE:
            acc, top, total = _add_list(
                acc, top, total, u_place, u_acc, u_top, u_total, u_offsets, u_lists, u_programs, u_units, row,
                head, real,
                HEADS, 1, VALUE_DIM, BLOCK_V, PIECES,
            )  # fmt: skip
        if SHARED:
            acc, top, total = _add_list(
                acc, top, total, s_place, s_acc, s_top, s_total, s_offsets, s_lists, s_programs, s_units, row,
                head, real,
                HEADS, S_ROWS, VALUE_DIM, BLOCK_V, PIECES,
            )  # fmt: skip
        if SELECTED:
            acc, top, total = _add_list(
                acc, top, total, c_place, c_acc, c_top, c_total, c_offsets, c_lists, c_programs, c_units, row,
                head, real,
                HEADS, C_ROWS, VALUE_DIM, BLOCK_V, PIECES,
            )  # fmt: skip
        if OWN:
            if has_own:
                acc, top, total = _add_list(
                    acc, top, total, w_place, w_acc, w_top, w_total, w_offsets, w_lists, w_programs, w_units, row,
                    head, real,
                    HEADS, W_ROWS, VALUE_DIM, BLOCK_V, PIECES,
                )  # fmt: skip
        if LOGS:
            logs = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
            logs = tl.where(total == 0.0, NOTHING_SEEN, logs)
            tl.store(log_sums + row.to(tl.int64) * HEADS + head, logs, mask=real)
        if SINKS:
            acc, total = add_sink(acc, top, total, tl.load(sinks + head, mask=real, other=0.0))
        result = finish(acc, total)
        tl.store(
            out + row.to(tl.int64) * o_row + head[:, None] * o_head + e[None, :],
            result.to(out.dtype.element_ty),
            mask=real[:, None] & (e < VALUE_DIM)[None, :],
        )
