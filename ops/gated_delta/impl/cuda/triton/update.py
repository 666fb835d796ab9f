"""The gated delta rule for requests with few rows: a state is read once, and written after each row."""

import triton
import triton.language as tl


@triton.jit
def update_deltas(
    q,
    k,
    v,
    log_decay,
    beta,
    states,
    out,
    few_rows,
    few_sources,
    few_targets,
    scale,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FEW: tl.constexpr,
    NORMALISE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """A program for each request, head and VALUES columns of its state; programs of a request follow each other.

    Tensors as in `gated_delta` and `StateRows`. q, k, v: rows with strides between them. log_decay, beta: float32,
    contiguous. out: [rows, HEADS, VALUE_DIM], written for rows of requests with few rows. KEYS: a power of two, at
    least KEY_DIM.
    """
    pieces: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    request = (tl.program_id(0) // (HEADS * pieces)).to(tl.int64)
    head = tl.program_id(0) // pieces % HEADS
    row = tl.load(few_rows + request * FEW)
    if row >= 0:
        key = tl.arange(0, KEYS)
        value = tl.program_id(0) % pieces * VALUES + tl.arange(0, VALUES)
        has_key, has_value = key < KEY_DIM, value < VALUE_DIM
        place = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
        inside = has_key[:, None] & has_value[None, :]
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        source = tl.load(few_sources + request)
        state = tl.load(states + source * size + place, mask=inside, other=0.0).to(tl.float32)
        for index in tl.static_range(FEW):
            row = tl.load(few_rows + request * FEW + index)
            if row >= 0:
                of_key = head // REPEATS * KEY_DIM + key
                query_row = tl.load(q + row * q_stride + of_key, mask=has_key, other=0.0).to(tl.float32)
                key_row = tl.load(k + row * k_stride + of_key, mask=has_key, other=0.0).to(tl.float32)
                of_value = head * VALUE_DIM + value
                value_row = tl.load(v + row * v_stride + of_value, mask=has_value, other=0.0).to(tl.float32)
                if NORMALISE:
                    query_row = query_row * tl.rsqrt(tl.sum(query_row * query_row, 0) + 1e-6)
                    key_row = key_row * tl.rsqrt(tl.sum(key_row * key_row, 0) + 1e-6)
                state = state * tl.exp(tl.load(log_decay + row * HEADS + head))
                change = value_row - tl.sum(state * key_row[:, None], 0)
                change = change * tl.load(beta + row * HEADS + head)
                state = state + key_row[:, None] * change[None, :]
                found = tl.sum(state * (query_row * scale)[:, None], 0)
                tl.store(out + row * HEADS * VALUE_DIM + of_value, found.to(out.dtype.element_ty), mask=has_value)
                target = tl.load(few_targets + request * FEW + index)
                tl.store(states + target * size + place, state.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def open_gates(
    a,
    b,
    a_log,
    bias,
    log_decay,
    beta,
    count,
    row_stride,
    part_stride,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK of `count` gates per program; tensors as in `delta_gates`. The strides are a's and b's."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    head = index % HEADS
    place = index // HEADS * row_stride + head // PART * part_stride + head % PART
    step = tl.load(a + place, mask=mask, other=0.0).to(tl.float32)
    step += tl.load(bias + head, mask=mask, other=0.0).to(tl.float32)
    # softplus: a large number is its own
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    rate = tl.exp(tl.load(a_log + head, mask=mask, other=0.0).to(tl.float32))
    tl.store(log_decay + index, -rate * step, mask=mask)
    share = tl.load(b + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(beta + index, 1.0 / (1.0 + tl.exp(-share)), mask=mask)
