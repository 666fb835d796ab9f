"""The CUDA kernels of the KV cache. Runs on a GPU, or on a CPU in the process of test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops.launches import Launches
from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.ops.kv_cache.impl import reference

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("new", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("by_head", [False, True])
def test_keys_and_values_go_to_their_slots(new: torch.dtype, dtype: torch.dtype, by_head: bool) -> None:
    """covers: A10. In any layout, cast to the cache's dtype; every other slot is as it was."""
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    blocks, block_size, heads, dim, value_dim, rows = 5, 4, 3, 20, 12, 7
    pairs = torch.randn(blocks, block_size, heads, dim + value_dim, device=DEVICE).to(dtype)
    if by_head:
        pairs = pairs.transpose(1, 2).contiguous().transpose(1, 2)
    expected = pairs.clone()
    key, value = (torch.randn(rows, heads, size, device=DEVICE).to(new) for size in (dim, value_dim))
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:rows]
    caches = [(cache[..., :dim], cache[..., dim:]) for cache in (pairs, expected)]
    assert cuda.can_write(key, value, *caches[0])
    cuda.write(key, value, *caches[0], slots)
    reference.write(key, caches[1][0], slots)
    reference.write(value, caches[1][1], slots)
    assert torch.equal(pairs, expected)


def test_a_slot_outside_of_the_cache_is_not_written() -> None:
    """covers: A10."""
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    cache = torch.zeros(3, 4, 2, 8, device=DEVICE)
    inner = cache[1:2]
    tokens = torch.ones(3, 2, 8, device=DEVICE)
    cuda.write(tokens, tokens, inner, inner.clone(), torch.tensor([-1, 4, 2], device=DEVICE))
    assert cache.sum() == 16
    assert bool((inner[0, 2] == 1).all())


def test_caches_that_the_write_does_not_cover() -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    tokens, cache = torch.zeros(1, 2, 8), torch.zeros(3, 4, 2, 16)
    assert not cuda.can_write(tokens, tokens, cache[..., ::2], cache[..., :8])
    assert not cuda.can_write(tokens, tokens, cache[..., :8], cache[:2, ..., :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks_first", [False, True])
def test_blocks_of_all_layers_are_copied(dtype: torch.dtype, blocks_first: bool) -> None:
    """One launch for all layers; what is no target stays."""
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    layers, blocks, shape = 3, 6, (4, 2, 5)
    order = (blocks, layers) if blocks_first else (layers, blocks)
    source, target = (torch.randn(*order, *shape, device=DEVICE).to(dtype) for _ in range(2))
    if blocks_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    pairs = torch.tensor([[0, 5], [3, 1], [3, 2]], device=DEVICE)
    expected = target.clone()
    expected[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    assert cuda.can_copy(source, target)
    cuda.copy(source, target, pairs)
    assert torch.equal(target, expected)


def test_blocks_of_several_pieces_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece of a block may be a part of one."""
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    monkeypatch.setattr(cuda, "BLOCK_PIECE", 16)
    source, target = torch.randn(2, 2, 7, 3, 25, device=DEVICE)
    pairs = torch.tensor([[6, 0], [2, 5], [0, 6]], device=DEVICE)
    expected = target.clone()
    expected[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    cuda.copy(source, target, pairs)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(("blocks", "elements"), [(70_000, 8), (1 << 20, 5000), (8, 1 << 29)])
def test_any_number_of_pairs_is_a_grid_that_cuda_allows(
    monkeypatch: pytest.MonkeyPatch, blocks: int, elements: int
) -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda
    from vllm_gaudi_ucm.ops.kv_cache.impl.triton import blocks as kernels

    launches = Launches()
    monkeypatch.setattr(kernels, "copy_pairs", launches)
    source = torch.empty(3, blocks, elements, dtype=torch.int8, device="meta")
    cuda.copy(source, source, torch.empty(blocks, 2, dtype=torch.int64, device="meta"))
    launches.assert_allowed()


def test_more_blocks_than_a_grid_has_on_its_other_axes() -> None:
    """On a GPU; so many programs would take the interpreter minutes."""
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    count = 70_000 if torch.cuda.is_available() else 70
    source = torch.arange(count * 4, device=DEVICE).view(1, count, 4)
    target, blocks = torch.zeros_like(source), torch.arange(count, device=DEVICE)
    cuda.copy(source, target, torch.stack([blocks, blocks.flip(0)], 1))
    assert torch.equal(target, source.flip(1))


def test_blocks_that_are_not_one_run_are_not_covered() -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl import cuda

    cache = torch.zeros(2, 3, 4, 8)
    assert cuda.can_copy(cache, torch.zeros(2, 9, 4, 8))
    assert not cuda.can_copy(cache[..., :5], cache[..., 3:])
    assert not cuda.can_copy(cache, cache.transpose(2, 3))
