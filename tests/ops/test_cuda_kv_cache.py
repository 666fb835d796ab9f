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
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    num_slots, heads, dim, value_dim, rows = 20, 3, 20, 12, 7
    pairs = torch.randn(num_slots, heads, dim + value_dim, device=DEVICE).to(dtype)
    if by_head:
        pairs = pairs.transpose(0, 1).contiguous().transpose(0, 1)
    expected = pairs.clone()
    key, value = (torch.randn(rows, heads, size, device=DEVICE).to(new) for size in (dim, value_dim))
    slots = torch.randperm(num_slots, device=DEVICE)[:rows]
    caches = [(cache[..., :dim], cache[..., dim:]) for cache in (pairs, expected)]
    assert cuda.can_write(key, value, *caches[0])
    cuda.write(key, value, *caches[0], slots)
    reference.write(key, caches[1][0], slots)
    reference.write(value, caches[1][1], slots)
    assert torch.equal(pairs, expected)


def test_a_slot_outside_of_the_cache_is_not_written() -> None:
    """covers: A10."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    cache = torch.zeros(12, 2, 8, device=DEVICE)
    inner = cache[4:8]
    tokens = torch.ones(3, 2, 8, device=DEVICE)
    cuda.write(tokens, tokens, inner, inner.clone(), torch.tensor([-1, 4, 2], device=DEVICE))
    assert cache.sum() == 16
    assert bool((inner[2] == 1).all())


def test_caches_that_the_write_does_not_cover() -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    tokens, cache = torch.zeros(1, 2, 8), torch.zeros(12, 2, 16)
    assert not cuda.can_write(tokens, tokens, cache[..., ::2], cache[..., :8])
    assert not cuda.can_write(tokens, tokens, cache[..., :8], cache[:8, ..., :8])


def check_copy(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: torch.Tensor) -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    expected = [target.clone() for target in targets]
    for source, target in zip(sources, expected, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]
    assert cuda.can_copy(sources, targets)
    cuda.copy(sources, targets, pairs)
    assert all(torch.equal(target, wanted) for target, wanted in zip(targets, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["apart", "layers first", "blocks first"])
def test_blocks_of_all_layers_are_copied(dtype: torch.dtype, place: str) -> None:
    """One launch for all layers, wherever they are; what is no target stays."""

    def caches() -> list[torch.Tensor]:
        layers, blocks, shape = 3, 6, (4, 2, 5)
        if place == "apart":
            return [torch.randn(blocks, *shape, device=DEVICE).to(dtype) for _ in range(layers)]
        if place == "layers first":
            return list(torch.randn(layers, blocks, *shape, device=DEVICE).to(dtype))
        return list(torch.randn(blocks, layers, *shape, device=DEVICE).to(dtype).transpose(0, 1))

    check_copy(caches(), caches(), torch.tensor([[0, 5], [3, 1], [3, 2]], device=DEVICE))


def test_blocks_of_several_pieces_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece of a block may be a part of one."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    monkeypatch.setattr(cuda, "BLOCK_PIECE", 16)
    source, target = torch.randn(2, 2, 7, 3, 25, device=DEVICE)
    check_copy(list(source), list(target), torch.tensor([[6, 0], [2, 5], [0, 6]], device=DEVICE))


@pytest.mark.parametrize("to_host", [True, False])
def test_blocks_go_to_the_host_and_back_in_one_transfer(to_host: bool) -> None:
    """On a GPU. The interpreter, whose device is the host, runs the same two functions."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    host = torch.randn(3, 2, 4, 2, 5, pin_memory=torch.cuda.is_available())
    device = [torch.randn(6, 4, 2, 5, device=DEVICE) for _ in range(3)]
    pairs = torch.tensor([[4, 0], [1, 1]] if to_host else [[0, 4], [1, 1]])
    sources, targets = (device, list(host)) if to_host else (list(host), device)
    expected = [target.clone() for target in targets]
    reference.swap(sources, expected, pairs)
    copy = cuda.to_host if to_host else cuda.from_host
    assert copy(sources, targets, pairs, torch.cuda.is_available())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert all(torch.equal(target, wanted) for target, wanted in zip(targets, expected, strict=True))


@pytest.mark.parametrize(("blocks", "elements"), [(70_000, 8), (1 << 20, 5000), (8, 1 << 29)])
def test_any_number_of_pairs_is_a_grid_that_cuda_allows(
    monkeypatch: pytest.MonkeyPatch, blocks: int, elements: int
) -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda.triton import blocks as kernels

    launches = Launches()
    monkeypatch.setattr(kernels, "copy_pairs", launches)
    caches = list(torch.empty(3, blocks, elements, dtype=torch.int8, device="meta"))
    cuda.copy(caches, caches, torch.empty(blocks, 2, dtype=torch.int64, device="meta"))
    launches.assert_allowed()


def test_more_blocks_than_a_grid_has_on_its_other_axes() -> None:
    """On a GPU; so many programs would take the interpreter minutes."""
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    count = 70_000 if torch.cuda.is_available() else 70
    source = torch.arange(count * 4, device=DEVICE).view(count, 4)
    target, blocks = torch.zeros_like(source), torch.arange(count, device=DEVICE)
    cuda.copy([source], [target], torch.stack([blocks, blocks.flip(0)], 1))
    assert torch.equal(target, source.flip(0))


def test_blocks_that_are_not_one_run_are_not_covered() -> None:
    from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as cuda

    cache = torch.zeros(2, 3, 4, 8)
    assert cuda.can_copy(list(cache), list(torch.zeros(2, 9, 4, 8)))
    assert not cuda.can_copy(list(cache[..., :5]), list(cache[..., 3:]))
    assert not cuda.can_copy(list(cache), list(cache.transpose(2, 3)))
    assert not cuda.can_copy([cache[0], torch.zeros(3, 8, 4).transpose(1, 2)], list(cache))
