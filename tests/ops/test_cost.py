"""What is multiplied is proportional to what is used, counted in FLOPs of the matrix multiplications."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.oracle import attend
from vllm_gaudi_ucm.ops.unified_attention.impl import reference
from vllm_gaudi_ucm.ops.unified_attention.parts import CausalPart, CausalSlice, SharedGroup, SharedPart, UniquePart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

PLAIN = AttentionSpec(0.25)
SHAPE = Shape(heads=4, kv_heads=2, block_size=4, poison=0.0, pads=0)


def _flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _pair_flops(pairs: int, heads: int, dim: int) -> int:
    """Scores and values of each (row, token) pair, and nothing else."""
    return pairs * 2 * heads * dim * 2


def test_unique_cost_follows_the_blocks_in_use() -> None:
    """covers: A13. Neither the number of rows nor a one-hot reduction multiplies the cost of a block."""
    cache = torch.randn(64, 4, 2, 16)
    for rows in (1, 16):
        query = torch.randn(rows, 4, 16)
        for blocks in (16, 32, 64):
            owners = torch.arange(blocks) % rows
            hi = torch.full((blocks,), 4, dtype=torch.int32)
            part = UniquePart(torch.arange(blocks), owners, torch.zeros_like(hi), hi, rows)
            flops = _flops(lambda part=part, query=query: reference.unique(query, cache, cache, part, PLAIN))
            assert flops == _pair_flops(blocks * 4, 4, 16)


def test_packed_prompts_cost_their_own_squares() -> None:
    """covers: A15. Rows of different prompts are not multiplied; a slice skips the keys after it."""
    lengths, slice_size = [8, 16, 4, 32], 4
    slices, groups, pairs, first = [], [], 0, 0
    for index, length in enumerate(lengths):
        groups += [index] * length
        for lo in range(first, first + length, slice_size):
            slices.append(CausalSlice(lo, lo + slice_size, first, lo + slice_size))
            pairs += slice_size * (lo + slice_size - first)
        first += length
    rows = sum(lengths)
    query, key = torch.randn(rows, 4, 16), torch.randn(rows, 2, 16)
    part = CausalPart(torch.tensor(groups, dtype=torch.int32), tuple(slices))
    assert _flops(lambda: reference.causal(query, key, key, part, PLAIN)) == _pair_flops(pairs, 4, 16)
    assert pairs <= sum(n * (n + slice_size) // 2 for n in lengths)


def test_shared_cost_follows_the_groups() -> None:
    """covers: A14. Two groups of disjoint rows and blocks cost their own products, not all rows x all blocks."""
    query, cache = torch.randn(8, 4, 16), torch.randn(16, 4, 2, 16)
    spans = torch.tensor([0] * 4 + [1] * 4)
    hi = torch.zeros(2, 6, dtype=torch.int32)
    hi[0, :4], hi[1, 4:] = 4, 4
    groups = (SharedGroup(torch.arange(4), 0, 4), SharedGroup(torch.arange(4, 8), 4, 6))
    part = SharedPart(torch.arange(1, 7), spans, torch.zeros_like(hi), hi, groups)
    flops = _flops(lambda: reference.shared(query, cache, cache, part, PLAIN))
    assert flops == _pair_flops(4 * 16 + 4 * 8, 4, 16)


def test_shared_memory_is_bounded_by_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A14. No score tensor is larger than a tile, however many rows share however many blocks."""
    monkeypatch.setattr(reference, "ROW_TILE", 8)
    monkeypatch.setattr(reference, "TOKEN_TILE", 16)
    seen: list[int] = []
    plain = reference._attend_visible

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: object) -> object:
        seen.append(query.shape[0] * key.shape[0])
        return plain(query, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "_attend_visible", spy)
    query, cache = torch.randn(50, 4, 16), torch.randn(33, 4, 2, 16)
    hi = torch.full((1, 32), 4, dtype=torch.int32)
    groups = (SharedGroup(torch.arange(50), 0, 32),)
    part = SharedPart(torch.arange(1, 33), torch.zeros(50, dtype=torch.int64), torch.zeros_like(hi), hi, groups)
    reference.shared(query, cache, cache, part, PLAIN)
    assert max(seen) <= 8 * 16
    assert sum(seen) == 50 * 128


def _kernel_pairs(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> int:
    """(row, token) pairs given to the CPU kernel, a causal square counted whole."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import attention as cpu

    pairs = 0
    plain = cpu._flash

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: object, **named: object) -> object:
        nonlocal pairs
        pairs += query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return plain(query, key, *rest, **named)

    monkeypatch.setattr(cpu, "_flash", spy)
    attend(batch, "cpu")
    monkeypatch.setattr(cpu, "_flash", plain)
    return pairs // batch.query.shape[1]


def test_cpu_multiplies_little_more_than_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A13, A15. Packed prompts cost their squares, groups their product, decodes nearly their context."""
    prompts = [Request(0, length) for length in (8, 16, 4, 32)]
    assert _kernel_pairs(build(prompts, SHAPE), monkeypatch) == sum(request.new**2 for request in prompts)
    shared = [Request(12, 1, prefix=3)] * 5
    assert _kernel_pairs(build(shared, SHAPE), monkeypatch) == 5 * 12 + 5 * 1
    decodes = [Request(cached, 1) for cached in (5000, 4900, 64, 60, 3)]
    pairs = _kernel_pairs(build(decodes, SHAPE), monkeypatch)
    assert pairs <= sum(request.cached + 1 for request in decodes) + 512
