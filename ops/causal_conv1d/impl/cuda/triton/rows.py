"""Short convolutions over rows, and the rows that states keep."""

import triton
import triton.language as tl


@triton.jit
def past_rows(
    x, states, row, back, offset, source, channel, mask, x_stride, CHANNELS: tl.constexpr, LENGTH: tl.constexpr
):
    """Returns the rows that are `back` rows before rows of the same request: of this step, or of the request's state.

    row, offset, source: [rows, 1]. channel: [1, channels]. mask: [rows, channels].
    """
    in_step = offset >= back
    old = source * LENGTH + LENGTH + offset - back
    from_step = tl.load(x + (row - back) * x_stride + channel, mask=mask & in_step, other=0.0)
    from_state = tl.load(states + old * CHANNELS + channel, mask=mask & (in_step == 0), other=0.0)
    return tl.where(in_step, from_step.to(tl.float32), from_state.to(tl.float32))


@triton.jit(do_not_specialize=["rows", "row_blocks"])
def convolve_rows(
    x,
    weight,
    bias,
    states,
    out,
    kept,
    offsets,
    row_sources,
    kept_rows,
    rows,
    row_blocks,
    x_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for BLOCK channels of ROWS rows, and behind these programs, for BLOCK channels of a state that is kept.

    Tensors as in `causal_conv1d` and `StateRows`. x: rows with a stride between them. weight: contiguous.
    kept: [kept, TAPS - 1, CHANNELS], the states after `kept_rows`: they are copied to their slots later, because other
    programs may still read the states there. row_blocks: programs for the rows of BLOCK channels.
    """
    pieces: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    number = (tl.program_id(0) // pieces).to(tl.int64)
    channel = (tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK))[None, :]
    has_channel = channel < CHANNELS
    length: tl.constexpr = TAPS - 1
    if number < row_blocks:
        row = (number * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & has_channel
        offset = tl.load(offsets + row, mask=row < rows, other=0)
        source = tl.load(row_sources + row, mask=row < rows, other=0)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        if BIAS:
            total += tl.load(bias + channel, mask=has_channel, other=0.0).to(tl.float32)
        for back in tl.static_range(TAPS):
            found = past_rows(x, states, row, back, offset, source, channel, mask, x_stride, CHANNELS, length)
            tap = tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=has_channel, other=0.0)
            total += found * tap.to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + row * CHANNELS + channel, total.to(out.dtype.element_ty), mask=mask)
    else:
        # names of their own: a branch may not change a shape
        kept_row = tl.load(kept_rows + number - row_blocks + tl.arange(0, 1))[:, None]
        kept_offset, kept_source = tl.load(offsets + kept_row), tl.load(row_sources + kept_row)
        for back in tl.static_range(length):
            past = past_rows(
                x, states, kept_row, back, kept_offset, kept_source, channel, has_channel, x_stride, CHANNELS, length
            )
            place = (number - row_blocks) * length + (length - 1 - back)
            tl.store(kept + place * CHANNELS + channel, past.to(kept.dtype.element_ty), mask=has_channel)
