"""Blocks between cache and host: one run of bytes per block, whatever the cache's layout and the thread."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.ops.kv_cache.impl import native

BLOCKS, TOKENS = 5, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_caches(tokens_first: bool, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Two layers of one shape and a third, of a draft model say, of another; each [blocks, heads, tokens, width]."""
    caches = {}
    with torch.inference_mode():
        for name, heads, width in (("a", 2, 6), ("b", 2, 6), ("draft", 3, 4)):
            shape = (BLOCKS, TOKENS, heads, width) if tokens_first else (BLOCKS, heads, TOKENS, width)
            values = torch.randn(shape) if fill is None else torch.full(shape, fill)
            caches[name] = (values.transpose(1, 2) if tokens_first else values).to(DEVICE, torch.bfloat16)
    return caches


def in_thread(blocks: DeviceBlocks, block_id: int, block: memoryview) -> None:
    """Loads are delivered by threads of the prefetch engine."""
    errors: list[BaseException] = []
    fence = blocks.fence()

    def run() -> None:
        try:
            blocks.write(block_id, block, fence)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("target_tokens_first", [True, False])
@pytest.mark.parametrize("source_tokens_first", [True, False])
def test_a_block_moves_between_caches_of_any_layout(
    source_tokens_first: bool, target_tokens_first: bool, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: D7. The bytes that are stored do not depend on the layout, and no other block changes."""
    if not is_native:
        monkeypatch.setattr(native, "can_swap", lambda sources, targets: False)
    source = make_caches(source_tokens_first)
    target = make_caches(target_tokens_first, fill=torch.nan)
    device = get_device(DEVICE)
    reader, writer = DeviceBlocks(source, device), DeviceBlocks(target, device)
    assert reader.block_bytes == writer.block_bytes == 2 * TOKENS * (2 * 12 + 12)
    moved = {3: 1, 0: 4}
    buffers = {block: reader.allocate(reader.block_bytes) for block in moved}
    reader.read(list(buffers.items()))
    for block, place in moved.items():
        in_thread(writer, place, buffers[block])
    for name, cache in target.items():
        for block, place in moved.items():
            assert torch.equal(cache[place], source[name][block])
        assert cache[[0, 2, 3]].isnan().all()


def test_stored_bytes_are_layers_tokens_heads() -> None:
    caches = make_caches(tokens_first=True)
    blocks = DeviceBlocks(caches, get_device(DEVICE))
    buffer = blocks.allocate(blocks.block_bytes)
    blocks.read([(2, buffer)])
    expected = torch.cat([cache[2].transpose(0, 1).flatten() for cache in caches.values()]).cpu()
    assert bytes(buffer) == bytes(expected.view(torch.uint8).numpy())


def test_warming_up_changes_nothing() -> None:
    caches = make_caches(tokens_first=True)
    before = {name: cache.clone() for name, cache in caches.items()}
    DeviceBlocks(caches, get_device(DEVICE)).warm_up()
    assert all(torch.equal(cache, before[name]) for name, cache in caches.items())


@pytest.mark.skipif(DEVICE == "cpu", reason="what is launched on a CPU has run")
@torch.inference_mode()
def test_a_load_comes_after_steps_that_still_compute() -> None:
    """covers: F6"""
    caches = make_caches(tokens_first=True)
    blocks = DeviceBlocks(caches, get_device(DEVICE))
    block = blocks.allocate(blocks.block_bytes)
    blocks.read([(2, block)])
    expected = {name: cache[2].clone() for name, cache in caches.items()}
    torch.cuda._sleep(300_000_000)
    for cache in caches.values():
        cache.fill_(torch.nan)
    in_thread(blocks, 2, block)
    torch.cuda.synchronize()
    for name, cache in caches.items():
        assert torch.equal(cache[2], expected[name])
        assert cache[[0, 1, 3, 4]].isnan().all()
