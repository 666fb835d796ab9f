"""The gated delta rule for prompts: a triangular system for each tile, and then the states from tile to tile."""

import triton
import triton.language as tl

from vllm_gaudi_ucm.ops.cuda.triton.state_tiles import decays, end_of_request, inverse_of_unit_lower


@triton.jit
def solve_tiles(
    q,
    k,
    v,
    log_decay,
    beta,
    tile_rows,
    tile_sources,
    u,
    w,
    of_queries,
    query_factors,
    key_factors,
    tile_decays,
    scale,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMALISE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """A program for each tile and head. A pad neither decays a state nor changes it.

    Tensors as in `gated_delta` and `StateRows`; q, k, v: rows with strides between them. Writes, for each tile and
    head, all contiguous: u [ROWS, VALUE_DIM] and w [ROWS, KEY_DIM], of which row i changes the value of its key by
    u_i - w_i S; of_queries [ROWS, ROWS], the shares of these changes in results; query_factors and key_factors [ROWS],
    float32, of q before its product with S, and of k after the tile; tile_decays, float32.
    Operands of products have the dtype of u. PRECISION, INVERSE: of products, and of these for the inverse.
    """
    tile, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    index, key, value = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    row = tl.load(tile_rows + tile * WIDTH + index, mask=index < WIDTH, other=-1)
    is_row = row >= 0
    if (tl.load(tile_sources + tile) < 0) | (tl.max(row, 0) >= 0):
        row = tl.maximum(row, 0)
        number = tile * HEADS + head
        operand = u.dtype.element_ty
        has_key, has_value = is_row[:, None] & (key < KEY_DIM)[None, :], is_row[:, None] & (value < VALUE_DIM)[None, :]
        of_key = (head // REPEATS * KEY_DIM + key)[None, :]
        keys = tl.load(k + row[:, None] * k_stride + of_key, mask=has_key, other=0.0).to(operand)
        queries = tl.load(q + row[:, None] * q_stride + of_key, mask=has_key, other=0.0).to(operand)
        key_scale, query_scale = tl.where(is_row, 1.0, 0.0), tl.where(is_row, scale, 0.0)
        if NORMALISE:
            wide = keys.to(tl.float32)
            key_scale *= tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
            wide = queries.to(tl.float32)
            query_scale *= tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        from_start, between, to_end, whole = decays(
            tl.load(log_decay + row * HEADS + head, mask=is_row, other=0.0), ROWS
        )
        share = tl.load(beta + row * HEADS + head, mask=is_row, other=0.0)
        of_keys = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between
        of_keys *= (share * key_scale)[:, None] * key_scale[None, :]
        inverse = inverse_of_unit_lower(tl.where(index[:, None] > index[None, :], of_keys, 0.0), ROWS, LEVELS, INVERSE)
        values = tl.load(
            v + row[:, None] * v_stride + (head * VALUE_DIM + value)[None, :], mask=has_value, other=0.0
        ).to(operand)
        found = tl.dot((inverse * share[None, :]).to(operand), values, input_precision=PRECISION)
        place = (number * ROWS + index)[:, None]
        tl.store(u + place * VALUE_DIM + value[None, :], found.to(operand), mask=(value < VALUE_DIM)[None, :])
        inverse *= (share * from_start * key_scale)[None, :]
        found = tl.dot(inverse.to(operand), keys, input_precision=PRECISION)
        tl.store(w + place * KEY_DIM + key[None, :], found.to(operand), mask=(key < KEY_DIM)[None, :])
        shares = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        shares *= query_scale[:, None] * key_scale[None, :]
        tl.store(of_queries + place * ROWS + index[None, :], shares.to(operand))
        tl.store(query_factors + number * ROWS + index, query_scale * from_start)
        tl.store(key_factors + number * ROWS + index, key_scale * to_end)
        tl.store(tile_decays + number, whole)


@triton.jit(do_not_specialize=["tiles"])
def walk_deltas(
    q,
    k,
    u,
    w,
    of_queries,
    query_factors,
    key_factors,
    tile_decays,
    states,
    out,
    tile_rows,
    tile_sources,
    tile_targets,
    tiles,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    NULL: tl.constexpr,
):
    """A program for each head, VALUES columns of its state, and request: it walks through the tiles of the request that
    begins with its tile, and programs of other tiles have nothing to do.

    Tensors as `solve_tiles` writes them. out: [rows, HEADS, VALUE_DIM], written for rows of tiles. NULL: the slot that
    is not written. TILES: a power of two, at least `tiles`.
    """
    pieces: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, first = tl.program_id(0) // pieces, tl.program_id(1).to(tl.int64)
    source = tl.load(tile_sources + first).to(tl.int64)
    if (source >= 0) & (tl.load(tile_rows + first * WIDTH) >= 0):
        operand = u.dtype.element_ty
        index, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
        value = tl.program_id(0) % pieces * VALUES + tl.arange(0, VALUES)
        has_key, has_value = key < KEY_DIM, value < VALUE_DIM
        inside = has_key[:, None] & has_value[None, :]
        place = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        of_key = (head // REPEATS * KEY_DIM + key)[None, :]
        state = tl.load(states + source * size + place, mask=inside, other=0.0).to(tl.float32)
        count = end_of_request(tile_sources, first, tiles, TILES) - first
        for step in tl.range(0, count, num_stages=STAGES):
            tile = first + step
            number = tile * HEADS + head
            row = tl.load(tile_rows + tile * WIDTH + index, mask=index < WIDTH, other=-1)
            is_row = row >= 0
            row = tl.maximum(row, 0)
            entry = (number * ROWS + index)[:, None]
            of_w = tl.load(w + entry * KEY_DIM + key[None, :], mask=has_key[None, :], other=0.0)
            change = tl.load(u + entry * VALUE_DIM + value[None, :], mask=has_value[None, :], other=0.0)
            at_key = is_row[:, None] & has_key[None, :]
            keys = tl.load(k + row[:, None] * k_stride + of_key, mask=at_key, other=0.0).to(operand)
            queries = tl.load(q + row[:, None] * q_stride + of_key, mask=at_key, other=0.0).to(operand)
            shares = tl.load(of_queries + entry * ROWS + index[None, :])
            before = state.to(operand)
            changes = change.to(tl.float32) - tl.dot(of_w, before, input_precision=PRECISION)
            found = tl.dot(queries, before, input_precision=PRECISION)
            found *= tl.load(query_factors + number * ROWS + index)[:, None]
            found += tl.dot(shares, changes.to(operand), input_precision=PRECISION)
            changes *= tl.load(key_factors + number * ROWS + index)[:, None]
            state *= tl.load(tile_decays + number)
            state += tl.dot(tl.trans(keys), changes.to(operand), input_precision=PRECISION)
            at_value = row[:, None] * HEADS * VALUE_DIM + (head * VALUE_DIM + value)[None, :]
            at_row = is_row[:, None] & has_value[None, :]
            tl.store(out + at_value, found.to(out.dtype.element_ty), mask=at_row)
            target = tl.load(tile_targets + tile).to(tl.int64)
            if target != NULL:
                tl.store(states + target * size + place, state.to(states.dtype.element_ty), mask=inside)
