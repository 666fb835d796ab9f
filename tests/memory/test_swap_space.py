"""Copies of blocks to host memory and back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vllm_gaudi_ucm.device.cpu import CpuDevice
from vllm_gaudi_ucm.memory import swap_space
from vllm_gaudi_ucm.memory.swap_space import SwapSpace

BLOCKS, SIZE = 12, 4


class BesideDevice(CpuDevice):
    """A CPU that says of itself that it copies beside the computation, as a GPU does."""

    pins_host_memory = True

    def __init__(self) -> None:
        self.entered = 0
        self.fails = False

    @contextmanager
    def beside_computation(self, after: object) -> Iterator[None]:
        self.entered += 1
        if self.fails:
            raise RuntimeError("the link is gone")
        yield


class OneByOne(CpuDevice):
    """A CPU that passes for a Gaudi: one block is one recipe."""

    kind = "hpu"

    def __init__(self) -> None:
        self.recipes = 0

    def end_recipe(self) -> None:
        self.recipes += 1


def caches() -> list[list[torch.Tensor]]:
    """Keys and values of two layers, and those of a layer of another shape."""
    wide = [torch.randn(BLOCKS, SIZE, 2, 8) for _ in range(4)]
    narrow = [torch.randn(BLOCKS, SIZE, 1, 8).to(torch.bfloat16) for _ in range(2)]
    return [wide, narrow]


def read(runs: list[list[torch.Tensor]], number: int) -> list[torch.Tensor]:
    return [cache[number].clone() for run in runs for cache in run]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots each; page-locked memory is a device's."""
    monkeypatch.setattr(swap_space, "CHUNK_BYTES", 3 * (4 * SIZE * 2 * 8 * 4 + 2 * SIZE * 8 * 2))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))


@pytest.mark.parametrize("device", [CpuDevice(), BesideDevice(), OneByOne()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_come_back_as_they_left(device: CpuDevice, seed: int) -> None:
    rng = random.Random(seed)
    runs = caches()
    space = SwapSpace(runs, device, 8)
    slots: dict[int, list[torch.Tensor]] = {}
    for _ in range(30):
        free = [slot for slot in range(8) if slot not in slots]
        if free and rng.random() < 0.6:
            taken = rng.sample(free, rng.randint(1, len(free)))
            pairs = list(zip(rng.sample(range(BLOCKS), len(taken)), taken, strict=True))
            kept = {slot: read(runs, number) for number, slot in pairs}
            space.store(pairs)
            slots |= kept
            for number, _ in pairs:  # they are another's at once
                for run in runs:
                    for cache in run:
                        cache[number] = rng.random()
        elif slots:
            given = rng.sample(sorted(slots), rng.randint(1, len(slots)))
            targets = rng.sample(range(BLOCKS), len(given))
            space.load(list(zip(given, targets, strict=True)))
            for slot, number in zip(given, targets, strict=True):
                for found, wanted in zip(read(runs, number), slots.pop(slot), strict=True):
                    assert torch.equal(found, wanted)
    space.close()


def test_measuring_changes_nothing() -> None:
    runs = caches()
    before = [[cache.clone() for cache in run] for run in runs]
    speed = SwapSpace(runs, CpuDevice(), 2).measure()
    assert min(speed.to_host, speed.from_host) > 0
    for run, kept in zip(runs, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(run, kept, strict=True))


def test_memory_is_taken_as_slots_are_used() -> None:
    space = SwapSpace(caches(), CpuDevice(), 8)
    assert not space._chunks
    space.store([(1, 0)])
    assert len(space._chunks) == 1
    space.store([(1, 7)])
    assert [chunk[0].shape[0] for chunk in space._chunks] == [3, 3, 2]


def test_a_copy_beside_the_step_that_fails_is_seen() -> None:
    device = BesideDevice()
    space = SwapSpace(caches(), device, 8)
    device.fails = True
    space.store([(1, 0)])
    with pytest.raises(RuntimeError, match="the link is gone"):
        space.load([(0, 1)])
    space.close()


def test_one_recipe_for_each_block_on_a_gaudi() -> None:
    device = OneByOne()
    space = SwapSpace(caches(), device, 8)
    space.store([(1, 0), (2, 1), (3, 2)])
    assert device.recipes == 6
