"""Copies of whole blocks: bytes arrive where they should, and nothing else changes, in every layout and way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.kv_cache import api as blocks_api
from vllm_gaudi_ucm.ops.kv_cache.api import copy_blocks, swap_blocks
from vllm_gaudi_ucm.ops.kv_cache.impl import reference as blocks_reference
from vllm_gaudi_ucm.ops.kv_cache.impl.cpu import native as native_blocks

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 6, 2, 4, 10
LAYOUTS = ("layers_first", "blocks_first", "heads_first", "separate", "torn")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here"))]
PAIRS = torch.tensor([[4, 1], [0, 5], [3, 0]])


def make_caches(
    layout: str, dtype: torch.dtype, seed: int, device: str = "cpu", blocks: int = BLOCKS
) -> list[torch.Tensor]:
    """One [blocks, heads, tokens, width] per layer, with NaN among the bytes: copies are no arithmetic."""
    generator = torch.Generator().manual_seed(seed)

    def fill(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        values[torch.rand(shape, generator=generator) < 0.1] = torch.nan
        return values.to(device)

    if layout == "layers_first":
        return list(fill(LAYERS, blocks, TOKENS, HEADS, WIDTH).transpose(2, 3))
    if layout == "blocks_first":
        return list(fill(blocks, LAYERS, TOKENS, HEADS, WIDTH).transpose(2, 3).transpose(0, 1))
    if layout == "heads_first":
        return list(fill(LAYERS, blocks, HEADS, TOKENS, WIDTH))
    if layout == "torn":  # a hole after each head's tokens: no block is one run of bytes
        return list(fill(LAYERS, blocks, HEADS, TOKENS + 1, WIDTH)[..., :-1, :])
    return [fill(blocks, TOKENS, HEADS, WIDTH).transpose(1, 2) for _ in range(LAYERS)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def expected_after(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for source, target in zip(sources, targets, strict=True):
        copy = target.cpu().clone()
        for one, other in pairs.tolist():
            copy[other] = source[one].cpu()
        found.append(bits(copy))
    return found


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(bits(one), other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_swapped_blocks_arrive_bit_by_bit(
    source_layout: str, target_layout: str, dtype: torch.dtype, device: str
) -> None:
    """covers: A10. From and to the device; every other block keeps what it had, NaN included."""
    for from_device, to_device in ((device, "cpu"), ("cpu", device)):
        sources = make_caches(source_layout, dtype, 1, from_device)
        targets = make_caches(target_layout, dtype, 2, to_device, blocks=BLOCKS + 1)
        expected = expected_after(sources, targets, PAIRS)
        swap_blocks(sources, targets, PAIRS)
        check(targets, expected)


@pytest.mark.parametrize("pairs", [[[2, 3], [3, 4], [4, 5]], [[0, 2], [1, 4]], [[5, 0]], [[5, 1], [0, 2]]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_and_scattered_blocks(layout: str, pairs: list[list[int]]) -> None:
    """The reference and the API agree where one side, both or none are consecutive."""
    given = torch.tensor(pairs)
    sources, targets, others = (make_caches(layout, torch.float32, seed) for seed in (1, 2, 2))
    expected = expected_after(sources, targets, given)
    swap_blocks(sources, targets, given)
    blocks_reference.swap(sources, others, given)
    check(targets, expected)
    check(others, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copied_blocks_stay_in_their_cache(layout: str, device: str) -> None:
    caches = make_caches(layout, torch.bfloat16, 3, device)
    pairs = torch.tensor([[0, 2], [0, 3], [5, 1]])
    expected = expected_after(caches, caches, pairs)
    copy_blocks(caches, pairs[:, 0], pairs[:, 1])
    check(caches, expected)


def test_which_layouts_are_one_launch_and_which_are_native() -> None:
    """Evenly spaced layers are one view; a block that is one run of bytes on both sides is copied by the kernel."""
    stacks = {layout: blocks_reference.stacked(make_caches(layout, torch.float32, 1)) for layout in LAYOUTS}
    assert {layout for layout, stack in stacks.items() if stack is None} == {"separate"}
    stack = stacks["layers_first"]
    assert stack is not None
    assert torch.equal(
        bits(stack), torch.stack([bits(cache) for cache in make_caches("layers_first", torch.float32, 1)])
    )
    if native() is not None:
        by_layout = {layout: make_caches(layout, torch.float32, 1) for layout in LAYOUTS}
        covered = {layout for layout, caches in by_layout.items() if native_blocks.can_swap(caches, caches)}
        assert covered == {"layers_first", "blocks_first", "heads_first", "separate"}
        assert not native_blocks.can_swap(by_layout["layers_first"], by_layout["heads_first"])


def test_no_blocks() -> None:
    caches = make_caches("separate", torch.float32, 1)
    expected = [bits(cache) for cache in caches]
    swap_blocks(caches, caches, torch.empty(0, 2, dtype=torch.int64))
    none = torch.empty(0, dtype=torch.int64)
    copy_blocks(caches, none, none)
    check(caches, expected)


def test_what_does_not_fit_raises_and_changes_nothing() -> None:
    """covers: C15"""
    sources, targets = (make_caches("layers_first", torch.float32, seed) for seed in (1, 2))
    expected = [bits(cache) for cache in targets]
    for pairs in ([[0, BLOCKS]], [[-1, 0]], [[0, 1], [BLOCKS, 2]]):
        with pytest.raises(IndexError, match="expected 0 to 5"):
            swap_blocks(sources, targets, torch.tensor(pairs))
    for case, message in (
        ((sources[:2], targets, PAIRS), "2 sources and 3 targets"),
        (([], [], PAIRS), "0 sources"),
        ((sources, [target[:, :1] for target in targets], PAIRS), "expected blocks of one shape"),
        ((sources, [target.double() for target in targets], PAIRS), "shape and dtype"),
        (([sources[0], sources[1][:2], sources[2]], targets, PAIRS), "the same of each layer"),
        ((sources, targets, PAIRS.int()), "torch.int64"),
        ((sources, targets, PAIRS[:, 0]), "pairs of"),
        ((sources, targets, torch.tensor([[0, 1], [2, 1]])), "target twice"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_blocks(*case)
    with pytest.raises(ValueError, match=r"blocks \[1\] as source and as target"):
        copy_blocks(targets, torch.tensor([0, 1]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="pairs of"):
        copy_blocks(targets, torch.tensor([0, 1]), torch.tensor([2]))
    check(targets, expected)


def test_a_pair_alone_has_the_strides_of_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gaudi would compile the copy of a block again: the strides of its numbers are part of a recipe."""
    seen = []
    swap = type(blocks_api.KV_CACHE.choose("auto", "cpu")).swap

    def spy(self: Any, sources: Any, targets: Any, pairs: torch.Tensor, non_blocking: bool) -> bool:
        seen.append((pairs[:, 0].stride(), pairs[:, 1].stride()))
        return swap(self, sources, targets, pairs, non_blocking)

    monkeypatch.setattr(type(blocks_api.KV_CACHE.choose("auto", "cpu")), "swap", spy)
    caches = [torch.zeros(BLOCKS, TOKENS) for _ in range(2)]
    for ids in ([1], [1, 2, 3]):
        for pair in torch.tensor([ids, ids]).T.split(1):
            swap_blocks(caches[:1], caches[1:], pair)
    assert len(seen) == 4
    assert len(set(seen)) == 1
