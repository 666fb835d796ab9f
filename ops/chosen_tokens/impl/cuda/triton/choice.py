"""The best columns of each row of a table of scores, in their order: a radix select over pieces of rows in parallel.

A score is an unsigned integer of the same order, found digit by digit, the highest 11 bits first: a histogram of a
digit says which one the last chosen score has, and how many scores are still wanted among those with that digit.
"""

import triton
import triton.language as tl

BINS = tl.constexpr(2048)
DIGITS = tl.constexpr(3)


@triton.jit
def _load_ordered(scores, column, width):
    """Returns scores as uint32 of the same order, and which of them exist."""
    found = tl.load(scores + column, mask=column < width, other=float("-inf"))
    bits = found.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return ordered.to(tl.uint32, bitcast=True), found != float("-inf")


@triton.jit
def _find_digit(histogram, wanted):
    """Returns the digit of the score that is the `wanted`-th from above, 0 if there are fewer; and how many scores of
    this digit are wanted.
    """
    b = tl.arange(0, BINS)
    number = tl.load(histogram + b)
    reached = tl.sum(number, 0) - tl.cumsum(number, 0) + number
    digit = tl.max(tl.where(reached >= wanted, b, 0), 0)
    return digit, wanted - tl.sum(tl.where(b > digit, number, 0), 0)


@triton.jit(do_not_specialize=["width", "wanted"])
def count_digits(scores, histograms, width, wanted, DIGIT: tl.constexpr, PIECE: tl.constexpr):
    """Grid (rows, pieces of PIECE columns). histograms: int32 [rows, DIGITS, BINS], zeros at first."""
    row = tl.program_id(0).to(tl.int64)
    ordered, seen = _load_ordered(scores + row * width, tl.program_id(1) * PIECE + tl.arange(0, PIECE), width)
    own = histograms + row * DIGITS * BINS
    if DIGIT == 0:
        digit = ordered >> 21
    else:
        first, wanted = _find_digit(own, wanted)
        if DIGIT == 1:
            seen = seen & ((ordered >> 21).to(tl.int32) == first)
            digit = (ordered >> 10) & 2047
        else:
            second, wanted = _find_digit(own + BINS, wanted)
            seen = seen & ((ordered >> 10).to(tl.int32) == first * 2048 + second)
            digit = ordered & 1023
    count = tl.sum(seen.to(tl.int32), 0)
    if count > 0:
        b = tl.arange(0, BINS)
        number = tl.histogram(tl.where(seen, digit.to(tl.int32), 0), BINS)
        # what does not count was put into the first one
        number -= tl.where(b == 0, PIECE - count, 0)
        tl.atomic_add(own + DIGIT * BINS + b, number, mask=number > 0)


@triton.jit(do_not_specialize=["width", "wanted", "pieces"])
def count_best(scores, histograms, counts, least, width, wanted, pieces, PIECE: tl.constexpr):
    """Grid (rows, pieces). counts: int32 [rows, pieces, 2], scores above the last chosen one, and equal to it.

    least: int32 [rows, 2], the bits of the last chosen score, and how many scores equal to it are chosen.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = histograms + row * DIGITS * BINS
    first, wanted = _find_digit(own, wanted)
    second, wanted = _find_digit(own + BINS, wanted)
    third, wanted = _find_digit(own + 2 * BINS, wanted)
    bits = (first << 21) | (second << 10) | third
    ordered, seen = _load_ordered(scores + row * width, piece * PIECE + tl.arange(0, PIECE), width)
    last = bits.to(tl.uint32, bitcast=True)
    place = counts + (row * pieces + piece) * 2
    tl.store(place, tl.sum((seen & (ordered > last)).to(tl.int32), 0))
    tl.store(place + 1, tl.sum((seen & (ordered == last)).to(tl.int32), 0))
    if piece == 0:
        tl.store(least + row * 2, bits)
        tl.store(least + row * 2 + 1, wanted)


@triton.jit(do_not_specialize=["first_row", "width", "wanted", "pieces", "num_places", "first_column", "begin"])
def write_best(
    scores,
    counts,
    least,
    table,
    slots,
    found,
    first_row,
    width,
    wanted,
    pieces,
    num_places,
    first_column,
    begin,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Grid (rows, pieces). found: int64 [rows of the step, wanted], -1 at first.

    Columns from `first_column` on are the rows `begin` and following, with `slots`; others are tokens of the blocks in
    `table`. See `score_unique`.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.arange(0, PIECES)
    before = counts + (row * pieces + p) * 2
    above_before = tl.sum(tl.load(before, mask=p < piece, other=0), 0)
    equal_before = tl.sum(tl.load(before + 1, mask=p < piece, other=0), 0)
    last = tl.load(least + row * 2).to(tl.uint32, bitcast=True)
    room = tl.load(least + row * 2 + 1)
    column = piece * PIECE + tl.arange(0, PIECE)
    ordered, seen = _load_ordered(scores + row * width, column, width)
    equal = (seen & (ordered == last)).to(tl.int32)
    chosen = seen & ((ordered > last) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= room)))
    at = above_before + tl.minimum(equal_before, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    is_new = column >= first_column
    place = tl.load(table + row * num_places + column // SIZE, mask=chosen & (column < first_column), other=0)
    new = tl.load(slots + begin + column - first_column, mask=chosen & is_new, other=0)
    slot = tl.where(is_new, new.to(tl.int64), place.to(tl.int64) * SIZE + column % SIZE)
    tl.store(found + (first_row + row) * wanted + at, slot, mask=chosen & (at < wanted))
