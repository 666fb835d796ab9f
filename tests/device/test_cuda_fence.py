"""On a GPU: what runs beside the computation comes after the steps before its fence, and waits for no others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from vllm_gaudi_ucm.device import Fence, get_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# a tenth of a second or more
CYCLES = 300_000_000
STEP, LOAD = 1.0, 2.0


def eager(cache: torch.Tensor) -> Callable[[], None]:
    """A step that takes long and then writes."""

    def step() -> None:
        torch.cuda._sleep(CYCLES)
        cache.fill_(STEP)

    return step


def captured(cache: torch.Tensor) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager(cache)()
    return graph.replay


def load(cache: torch.Tensor, after: Fence) -> None:
    """In a thread of its own, as loads are."""
    host = torch.full(cache.shape, LOAD, pin_memory=True)

    def run() -> None:
        device = get_device("cuda")
        device.enter_thread()
        with device.beside_computation(after):
            cache.copy_(host, non_blocking=True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("make", [eager, captured])
def test_a_load_comes_after_the_steps_before_its_fence(make: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    """covers: F6"""
    cache = torch.zeros(1 << 16, device="cuda")
    device, step = get_device("cuda"), make(cache)
    torch.cuda.synchronize()
    early = device.fence()
    step()
    load(cache, device.fence())
    torch.cuda.synchronize()
    assert bool((cache == LOAD).all())
    step()
    load(cache, early)
    torch.cuda.synchronize()
    assert bool((cache == STEP).all()), "the step is as late as it has to be for this test"


def test_a_load_waits_for_no_step_behind_its_fence() -> None:
    cache, other = torch.zeros(2, 1 << 16, device="cuda")
    device = get_device("cuda")
    torch.cuda.synchronize()
    fence = device.fence()
    eager(other)()
    end = torch.cuda.Event()
    end.record()
    load(cache, fence)
    assert not end.query()
    torch.cuda.synchronize()
    assert bool((cache == LOAD).all())


def test_an_error_waits_for_what_was_launched_before_it() -> None:
    """Who has the memory next may write to it at once."""
    device, end = get_device("cuda"), torch.cuda.Event()

    def fail() -> None:
        eager(torch.zeros(1 << 16, device="cuda"))()
        end.record()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"), device.beside_computation(device.fence()):
        fail()
    assert end.query()
