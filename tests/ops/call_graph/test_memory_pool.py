"""Memory of captured graphs: it stays where it is, and is lent again once no view of it is left."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import Arena, MemoryPool


def test_memory_is_lent_again_only_when_the_last_view_is_gone() -> None:
    pool = MemoryPool()
    first = pool.tensor(torch.Size((4, 6)), torch.float32)
    address = first.data_ptr()
    view = first.view(24).split([4, 20])[1]
    del first
    assert pool.tensor(torch.Size((4, 6)), torch.float32).data_ptr() != address
    del view
    # of the same size in bytes, whatever its shape and dtype
    again = pool.tensor(torch.Size((12,)), torch.int64)
    assert again.data_ptr() == address
    assert (again.dtype, again.shape, again.is_contiguous()) == (torch.int64, torch.Size((12,)), True)


def test_addresses_are_aligned_and_apart() -> None:
    pool = MemoryPool()
    tensors = [pool.tensor(torch.Size((size,)), torch.float32) for size in (1, 17, 17, 33, 64)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))
    # each up to the next multiple of 64 bytes
    assert pool.nbytes == 64 * (1 + 2 + 2 + 3 + 4)


def test_a_tensor_without_elements() -> None:
    assert MemoryPool().tensor(torch.Size((0, 5)), torch.float32).shape == (0, 5)


def test_a_tensor_that_is_not_kept_reads_the_same_memory() -> None:
    pool, own = MemoryPool(), torch.ones(3)
    first, second = (pool.tensor(torch.Size((4, 6)), torch.float32).fill_(value) for value in (1, 2))
    view = second.view(torch.int32)[1:, ::2]
    found = pool.unkept(view)
    assert (found.data_ptr(), found.dtype, found.stride()) == (view.data_ptr(), view.dtype, view.stride())
    assert torch.equal(found, view)
    address = second.data_ptr()
    del second, view
    assert pool.tensor(torch.Size((24,)), torch.float32).data_ptr() == address
    assert bool((first == 1).all())
    assert pool.unkept(own) is own


def test_what_fits_no_arena_gets_one_of_its_own() -> None:
    pool = MemoryPool(arena_bytes=4096)
    small, large, more = (pool.tensor(torch.Size((size,)), torch.uint8).fill_(1) for size in (4000, 10_000, 4000))
    assert pool.nbytes == 4032 + 10_048 + 4032
    large.fill_(2)
    assert all(bool((tensor == 1).all()) for tensor in (small, more))


@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_joined(seed: int) -> None:
    """Whatever was lent, and given back in whatever order: then all is free, and nothing was lent twice."""
    arena, chosen, lent = Arena(1 << 16), random.Random(seed), {}
    for _ in range(300):
        if lent and chosen.random() < 0.5:
            arena.give_back(start := chosen.choice([*lent]))
            del lent[start]
            continue
        size = chosen.randrange(1, 6000)
        start = arena.take_bytes(size)
        if start is not None:
            assert all(start + size <= other or other + length <= start for other, length in lent.items())
            lent[start] = size
    for start in chosen.sample([*lent], len(lent)):
        arena.give_back(start)
    assert arena.take_bytes(1 << 16) == 0
    assert arena.take_bytes(1) is None
