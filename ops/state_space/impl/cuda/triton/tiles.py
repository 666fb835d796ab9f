"""State-space layers for prompts: products over the rows of a tile, and the state from tile to tile, in one launch."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.cuda.triton.state_tiles import decays, end_of_request


@triton.jit(do_not_specialize=["tiles"])
def walk_spaces(
    x,
    dt,
    b,
    c,
    a,
    d,
    states,
    out,
    tile_rows,
    tile_sources,
    tile_targets,
    tiles,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SKIP: tl.constexpr,
    DIMS: tl.constexpr,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    NULL: tl.constexpr,
):
    """A program for each head, DIMS rows of its state, and request: it walks through the tiles of the request that
    begins with its tile, and programs of other tiles have nothing to do.

    Tensors as in `state_space` and `StateRows`. x, b, c: rows with strides between them. dt: float32, contiguous.
    out: [rows, HEADS, HEAD_DIM], written for rows of tiles. SKIP: d is given. OPERAND: dtype of what is multiplied.
    NULL: the slot that is not written. TILES: a power of two, at least `tiles`.
    """
    pieces: tl.constexpr = (HEAD_DIM + DIMS - 1) // DIMS
    head, first = tl.program_id(0) // pieces, tl.program_id(1).to(tl.int64)
    source = tl.load(tile_sources + first).to(tl.int64)
    if (source >= 0) & (tl.load(tile_rows + first * WIDTH) >= 0):
        index, entry = tl.arange(0, ROWS), tl.arange(0, SIZES)
        dim = tl.program_id(0) % pieces * DIMS + tl.arange(0, DIMS)
        has_dim, has_entry = dim < HEAD_DIM, entry < SIZE
        # turned: [SIZES, DIMS]
        inside = has_entry[:, None] & has_dim[None, :]
        place = head * HEAD_DIM * SIZE + dim[None, :] * SIZE + entry[:, None]
        size: tl.constexpr = HEADS * HEAD_DIM * SIZE
        of_group = (head // REPEATS * SIZE + entry)[None, :]
        state = tl.load(states + source * size + place, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(a + head).to(tl.float32)
        count = end_of_request(tile_sources, first, tiles, TILES) - first
        for step in tl.range(0, count, num_stages=STAGES):
            tile = first + step
            row = tl.load(tile_rows + tile * WIDTH + index, mask=index < WIDTH, other=-1)
            is_row = row >= 0
            row = tl.maximum(row, 0)
            at_entry = is_row[:, None] & has_entry[None, :]
            at_dim = is_row[:, None] & has_dim[None, :]
            b_rows = tl.load(b + row[:, None] * b_stride + of_group, mask=at_entry, other=0.0).to(OPERAND)
            c_rows = tl.load(c + row[:, None] * c_stride + of_group, mask=at_entry, other=0.0).to(OPERAND)
            of_dim = (head * HEAD_DIM + dim)[None, :]
            x_rows = tl.load(x + row[:, None] * x_stride + of_dim, mask=at_dim, other=0.0).to(OPERAND)
            dt_rows = tl.load(dt + row * HEADS + head, mask=is_row, other=0.0)
            from_start, between, to_end, whole = decays(dt_rows * rate, ROWS)
            shares = tl.dot(c_rows, tl.trans(b_rows), input_precision=PRECISION) * between * dt_rows[None, :]
            found = tl.dot(c_rows, state.to(OPERAND), input_precision=PRECISION) * from_start[:, None]
            found += tl.dot(shares.to(OPERAND), x_rows, input_precision=PRECISION)
            if SKIP:
                found += tl.load(d + head).to(tl.float32) * x_rows.to(tl.float32)
            added = (x_rows.to(tl.float32) * (dt_rows * to_end)[:, None]).to(OPERAND)
            state = state * whole + tl.dot(tl.trans(b_rows), added, input_precision=PRECISION)
            at_row = row[:, None] * HEADS * HEAD_DIM + of_dim
            tl.store(out + at_row, found.to(out.dtype.element_ty), mask=at_dim)
            target = tl.load(tile_targets + tile).to(tl.int64)
            if target != NULL:
                tl.store(states + target * size + place, state.to(states.dtype.element_ty), mask=inside)
