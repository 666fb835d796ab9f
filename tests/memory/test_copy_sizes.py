"""Numbers of blocks as powers of two: nothing is left over, and there are few sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.memory.memory_worker import MOST_TOGETHER, copy_sizes, largest_size


@given(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_sizes_are_few_powers_of_two(count: int, most: int) -> None:
    sizes = copy_sizes(count, most)
    assert sum(sizes) == count
    assert all(size <= most and size & (size - 1) == 0 for size in sizes)
    assert len(sizes) <= count // most + most.bit_length()


@given(st.integers(2, 100))
def test_sources_and_targets_fit_into_the_cache(num_blocks: int) -> None:
    largest = largest_size(num_blocks)
    assert largest <= MOST_TOGETHER
    assert 2 * largest <= num_blocks
    assert largest == MOST_TOGETHER or 4 * largest > num_blocks
