"""Parts of kernels over tiles of rows: decays between rows, an inverse, and where the tiles of a request end."""

import triton
import triton.language as tl


@triton.jit
def decays(log_decay, ROWS: tl.constexpr):
    """Returns exp of the sums of log_decay [ROWS]: up to each row; from row j to a later row i, [i, j], 1 on the
    diagonal and 0 above it; behind each row; and of all rows.

    Sums are float64: a difference of two sums has the error of the larger one, which a decay near 0 makes large.
    """
    # exp is 0 below
    total = tl.cumsum(tl.maximum(log_decay, -110.0).to(tl.float64), 0)
    whole = tl.sum(tl.maximum(log_decay, -110.0).to(tl.float64), 0)
    index = tl.arange(0, ROWS)
    apart = (total[:, None] - total[None, :]).to(tl.float32)
    is_later = index[:, None] >= index[None, :]
    between = tl.where(is_later, tl.exp(tl.where(is_later, apart, 0.0)), 0.0)
    return tl.exp(total.to(tl.float32)), between, tl.exp((whole - total).to(tl.float32)), tl.exp(whole.to(tl.float32))


@triton.jit
def inverse_of_unit_lower(lower, ROWS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of I + lower, [ROWS, ROWS], for a matrix with entries below the diagonal only.

    By products of blocks, like the function of this name in `state_tiles`: with the inverses of blocks of one size on
    its diagonal, two products yield the inverses of blocks twice as large. Up to blocks of 16, products are of the
    blocks on the diagonal alone. ROWS: 2 to the power of LEVELS, at least 16.
    """
    parts: tl.constexpr = ROWS // 16
    index = tl.arange(0, ROWS)
    row, column = index[:, None], index[None, :]
    of_part = (index // 16)[:, None, None] == tl.arange(0, parts)[None, :, None]
    blocks = tl.sum(tl.where(of_part, tl.reshape(lower, (ROWS, parts, 16)), 0.0), 1)
    blocks = tl.reshape(blocks, (parts, 16, 16))
    entry = tl.arange(0, 16)
    i, j = entry[None, :, None], entry[None, None, :]
    small = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, blocks, 0.0)
    for level in tl.static_range(1, 4):
        size = 1 << level
        is_corner = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        corner = tl.dot(small, tl.where(is_corner, blocks, 0.0), input_precision="ieee")
        small -= tl.dot(corner, small, input_precision="ieee")
    small = tl.reshape(small, (ROWS, 1, 16))
    found = tl.reshape(tl.where(of_part, small, 0.0), (ROWS, ROWS))
    for level in tl.static_range(4, LEVELS):
        size = 1 << level
        is_corner = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        corner = tl.dot(found, tl.where(is_corner, lower, 0.0), input_precision=PRECISION)
        found -= tl.dot(corner, found, input_precision=PRECISION)
    return found


@triton.jit
def end_of_request(tile_sources, first, tiles, TILES: tl.constexpr):
    """Returns the tile behind the last one of the request that begins with tile `first`. TILES: at least `tiles`."""
    tile = tl.arange(0, TILES)
    source = tl.load(tile_sources + tile, mask=tile < tiles, other=-1)
    return tl.min(tl.where((tile > first) & (source >= 0), tile, tiles), 0)
