"""State-space layers for requests with few rows: a state is read once, and written after each row."""

import triton
import triton.language as tl


@triton.jit
def update_spaces(
    x,
    dt,
    b,
    c,
    a,
    d,
    states,
    out,
    few_rows,
    few_sources,
    few_targets,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
    SKIP: tl.constexpr,
    DIMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """A program for each request, head and DIMS rows of its state; programs of a request follow each other.

    Tensors as in `state_space` and `StateRows`. x, b, c: rows with strides between them. dt: float32, contiguous.
    out: [rows, HEADS, HEAD_DIM], written for rows of requests with few rows. SKIP: d is given. SIZES: a power of two,
    at least SIZE.
    """
    pieces: tl.constexpr = (HEAD_DIM + DIMS - 1) // DIMS
    request = (tl.program_id(0) // (HEADS * pieces)).to(tl.int64)
    head = tl.program_id(0) // pieces % HEADS
    row = tl.load(few_rows + request * FEW)
    if row >= 0:
        dim, entry = tl.program_id(0) % pieces * DIMS + tl.arange(0, DIMS), tl.arange(0, SIZES)
        has_dim, has_entry = dim < HEAD_DIM, entry < SIZE
        place = head * HEAD_DIM * SIZE + dim[:, None] * SIZE + entry[None, :]
        inside = has_dim[:, None] & has_entry[None, :]
        whole: tl.constexpr = HEADS * HEAD_DIM * SIZE
        source = tl.load(few_sources + request)
        state = tl.load(states + source * whole + place, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(a + head).to(tl.float32)
        for index in tl.static_range(FEW):
            row = tl.load(few_rows + request * FEW + index)
            if row >= 0:
                of_head = head * HEAD_DIM + dim
                of_group = head // REPEATS * SIZE + entry
                x_row = tl.load(x + row * x_stride + of_head, mask=has_dim, other=0.0).to(tl.float32)
                b_row = tl.load(b + row * b_stride + of_group, mask=has_entry, other=0.0).to(tl.float32)
                c_row = tl.load(c + row * c_stride + of_group, mask=has_entry, other=0.0).to(tl.float32)
                dt_row = tl.load(dt + row * HEADS + head)
                state = state * tl.exp(dt_row * rate) + (dt_row * x_row)[:, None] * b_row[None, :]
                found = tl.sum(state * c_row[None, :], 1)
                if SKIP:
                    found += tl.load(d + head).to(tl.float32) * x_row
                tl.store(out + row * HEADS * HEAD_DIM + of_head, found.to(out.dtype.element_ty), mask=has_dim)
                target = tl.load(few_targets + request * FEW + index)
                tl.store(states + target * whole + place, state.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def take_time_steps(dt, bias, out, count, row_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of `count` steps per program; tensors as in `time_steps`. Rows of dt have a stride between them."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    head = index % HEADS
    step = tl.load(dt + index // HEADS * row_stride + head, mask=mask, other=0.0).to(tl.float32)
    step += tl.load(bias + head, mask=mask, other=0.0).to(tl.float32)
    # softplus: a large number is its own
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    tl.store(out + index, step, mask=mask)
