"""Blocks between cache and host: one run of bytes per block, whatever the thread."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.ops.kv_cache.impl.cpu import native

BLOCKS, TOKENS = 5, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_caches(fill: float | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, KvPair]:
    """Two layers of one shape and a third, of a draft model say, whose values are narrower than its keys."""
    caches = {}
    with torch.inference_mode():
        for name, heads, sizes in (("a", 2, (3, 3)), ("b", 2, (3, 3)), ("draft", 3, (3, 1))):
            shapes = [(BLOCKS * TOKENS, heads, size) for size in sizes]
            rows = [torch.randn(shape) if fill is None else torch.full(shape, fill) for shape in shapes]
            caches[name] = KvPair(*(one.to(DEVICE, dtype) for one in rows))
    return caches


def tensors(caches: dict[str, KvPair]) -> list[torch.Tensor]:
    """[blocks, tokens, heads, size] in the order of the stored bytes."""
    return [blocks for pair in caches.values() for blocks in in_blocks(pair, TOKENS)]


def make_blocks(caches: dict[str, KvPair]) -> DeviceBlocks:
    return DeviceBlocks(caches, TOKENS, get_device(DEVICE))


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_block_moves_between_caches(is_native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: D7. To its place in every tensor, and no other block changes."""
    if not is_native:
        monkeypatch.setattr(native, "can_swap", lambda sources, targets: False)
    source, target = make_caches(dtype=dtype), make_caches(fill=torch.nan, dtype=dtype)
    reader, writer = make_blocks(source), make_blocks(target)
    assert reader.block_bytes == writer.block_bytes == dtype.itemsize * TOKENS * (2 * 12 + 12)
    moved = {3: 1, 0: 4}
    buffers = {block: reader.allocate(reader.block_bytes) for block in moved}
    reader.read(list(buffers.items()))
    for block, place in moved.items():
        in_thread(writer, place, buffers[block])
    for found, expected in zip(tensors(target), tensors(source), strict=True):
        for block, place in moved.items():
            assert torch.equal(found[place].float(), expected[block].float())
        assert found[[0, 2, 3]].float().isnan().all()


def test_stored_bytes_are_layers_keys_and_values_tokens_heads() -> None:
    """Another order needs another FORMAT_VERSION of the store's keys."""
    caches = make_caches()
    blocks = make_blocks(caches)
    buffer = blocks.allocate(blocks.block_bytes)
    blocks.read([(2, buffer)])
    expected = torch.cat([one[2].flatten() for one in tensors(caches)]).cpu()
    assert bytes(buffer) == bytes(expected.view(torch.uint8).numpy())


def test_warming_up_changes_nothing() -> None:
    caches = make_caches()
    before = [one.clone() for one in tensors(caches)]
    make_blocks(caches).warm_up()
    assert all(torch.equal(found, one) for found, one in zip(tensors(caches), before, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="what is launched on a CPU has run")
@torch.inference_mode()
def test_a_load_comes_after_steps_that_still_compute() -> None:
    """covers: F6"""
    caches = make_caches()
    blocks = make_blocks(caches)
    block = blocks.allocate(blocks.block_bytes)
    blocks.read([(2, block)])
    expected = [one[2].clone() for one in tensors(caches)]
    torch.cuda._sleep(300_000_000)
    for one in tensors(caches):
        one.fill_(torch.nan)
    in_thread(blocks, 2, block)
    torch.cuda.synchronize()
    for found, one in zip(tensors(caches), expected, strict=True):
        assert torch.equal(found[2], one)
        assert found[[0, 1, 3, 4]].isnan().all()
