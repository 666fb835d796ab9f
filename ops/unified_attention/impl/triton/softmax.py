"""What all kernels share: one step of the online softmax, and values that not every row of a tile may see.

Scores are kept in units of log2 inside the kernels (exp2 is one instruction), so tops are base-2 logarithms; nothing
outside of these kernels reads them.
"""

import triton
import triton.language as tl

# Top of a row that has seen nothing: finite, for -inf - -inf would be NaN, and below every score.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def softmax_step(acc, top, total, scores, scale, value, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds a tile of keys to (acc, top, total): [rows, value_dim], [rows], [rows], all fp32; top is LOWEST at first.

    scores: fp32 [rows, keys], before scaling, -inf where a row does not see a key. scale: positive, times log2(e).
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def without_garbage(value, visible, tainted):
    """The values with 0 for what is not finite, and tainted [rows] set to 1 for rows that see such a token.

    Weight 0 times NaN is NaN: a token that only some rows of a tile see must not reach the others.
    """
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    broken = tl.max(tl.where(finite, 0, 1), 1)
    sees = tl.max(tl.where(visible, broken[None, :], 0), 1)
    return tl.where(finite, value, 0.0).to(value.dtype), tl.maximum(tainted, sees)


@triton.jit
def finish(acc, total):
    """[rows, value_dim] what rows have summed up, normalised; all of a row is NaN if anything of it is not finite.

    A token with one broken element is broken, as the reference has it, and its sums show no more than that element.
    """
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    broken = tl.max(tl.where(tl.abs(result) < float("inf"), 0, 1), 1)
    return tl.where(broken[:, None] > 0, float("nan"), result)


@triton.jit
def list_of(offsets, num_lists, position, LISTS: tl.constexpr):
    """The list that holds entry `position`; offsets: [num_lists + 1] where each list begins, and the end."""
    index = tl.arange(0, LISTS)
    ends = tl.load(offsets + 1 + index, mask=index < num_lists, other=2147483647)
    return tl.sum(tl.where(ends <= position, 1, 0), 0)


@triton.jit
def share_of(program, programs, entries):
    """First entry and end of a program's even share. No more programs share than there are entries, so that none
    between two that do is idle: what it would leave is read without having been written."""
    sharing = tl.minimum(programs, entries)
    if program < sharing:
        first = (program.to(tl.int64) * entries // sharing).to(tl.int32)
        end = ((program + 1).to(tl.int64) * entries // sharing).to(tl.int32)
    else:
        first = entries
        end = entries
    return first, end
