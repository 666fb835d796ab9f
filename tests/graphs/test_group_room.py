"""Blocks of other KV-cache groups in a bucket: each step has a bucket that holds all of its groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.group_room import GroupBlocks, group_room, most_blocks, with_groups
from vllm_gaudi_ucm.graphs.shapes.limits import Limits

LIMITS = Limits(256, 8, 1024, 16, 400, contiguous=False, max_shared_blocks=128)
SIZES = st.integers(0, 64)


def test_a_window_may_begin_and_end_inside_of_a_block() -> None:
    assert [most_blocks(window, 16) for window in (1, 2, 16, 17, 18, 1024)] == [1, 2, 2, 2, 3, 65]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Bucket, list[tuple[GroupBlocks, int | None]]]:
    """A step and what it has of other groups: of a window at most `in_window` blocks for each request."""
    rows = draw(st.integers(1, 200))
    causal = draw(st.booleans()) and rows > 1
    shape = ForwardShape.from_sizes(causal, rows, draw(SIZES), draw(SIZES))
    others: list[tuple[GroupBlocks, int | None]] = []
    for _ in range(draw(st.integers(1, 3))):
        in_window = draw(st.none() | st.integers(1, 5))
        if in_window is None:
            others.append((GroupBlocks(draw(st.integers(0, 128)), draw(st.integers(0, 390))), None))
            continue
        most = min(rows, LIMITS.max_num_seqs) * in_window
        shared = st.integers(0, min(most, LIMITS.most_shared_blocks))
        others.append((GroupBlocks(draw(shared), draw(st.integers(0, most))), in_window))
    return shape.step(1), others


@given(steps(), st.integers(0, 50), st.integers(0, 300), st.integers(0, 300))
def test_a_bucket_that_holds_the_raised_step_holds_every_group(
    step: tuple[Bucket, list[tuple[GroupBlocks, int | None]]], rows: int, shared: int, unique: int
) -> None:
    true, others = step
    needed = with_groups(true, others)
    assert dominates(needed, true)
    assert dominates(LIMITS.maximum, needed)
    sizes = (needed.query_len + rows, min(needed.shared_blocks + shared, 128), needed.unique_blocks + unique)
    bucket = ForwardShape.from_sizes("c" in needed.phase, *sizes)
    for blocks, in_window in others:
        room = group_room(bucket, LIMITS, in_window)
        assert blocks.shared <= room.shared
        assert blocks.unique <= room.unique


def test_groups_that_need_no_more_leave_the_step_as_it_is() -> None:
    step = ForwardShape.from_sizes(False, 8, 0, 64).step(8)
    assert with_groups(step, [(GroupBlocks(0, 24), 3), (GroupBlocks(0, 64), None)]) is step


def test_a_decode_bucket_has_its_windows_and_no_shared_part() -> None:
    assert group_room(ForwardShape.from_sizes(False, 8, 0, 300), LIMITS, 3) == (0, 24)
    assert group_room(ForwardShape.from_sizes(False, 8, 0, 10), LIMITS, 3) == (0, 10)
