"""Memory of captured graphs: it stays where it is, and is lent again once no view of it is left."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.ops.native.call_graph.memory_pool import MemoryPool


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
    assert pool.nbytes == 4 * (1 + 17 + 17 + 33 + 64)


def test_a_tensor_without_elements() -> None:
    assert MemoryPool().tensor(torch.Size((0, 5)), torch.float32).shape == (0, 5)
