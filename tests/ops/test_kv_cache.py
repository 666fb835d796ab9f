"""The KV-cache write: slots, strided caches, casts, pads."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi_ucm.ops.kv_cache.api import write_kv

BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM = 5, 4, 2, 16, 24


def _caches(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    def empty(dim: int) -> torch.Tensor:
        if layout == "split":  # key and value planes one after the other: blocks are adjacent
            return torch.full((2, BLOCKS, BLOCK_SIZE, KV_HEADS, dim), -1.0, dtype=dtype)[0]
        if layout == "paired":  # key and value of a block side by side: holes between blocks
            return torch.full((BLOCKS, 2, BLOCK_SIZE, KV_HEADS, dim), -1.0, dtype=dtype)[:, 0]
        return torch.full((BLOCKS, KV_HEADS, BLOCK_SIZE, dim), -1.0, dtype=dtype).transpose(1, 2)

    return empty(DIM), empty(VALUE_DIM)


@pytest.mark.parametrize("layout", ["split", "paired", "heads_first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_lands_in_its_slot_and_nowhere_else(layout: str, dtype: torch.dtype) -> None:
    """covers: A10. Every other slot keeps what it had, in views with and without holes."""
    key_cache, value_cache = _caches(layout, dtype)
    slots = torch.tensor([4, 19, 7, 8])
    key, value = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, VALUE_DIM)
    write_kv(key, value, key_cache, value_cache, slots)
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.reshape(BLOCKS * BLOCK_SIZE, KV_HEADS, -1)
        assert torch.equal(flat[slots], tokens.to(dtype))
        others = [slot for slot in range(BLOCKS * BLOCK_SIZE) if slot not in slots.tolist()]
        assert (flat[others] == -1).all()


@pytest.mark.parametrize("layout", ["split", "paired"])
def test_pads_repeat_dummy_slots(layout: str) -> None:
    """covers: A10. Repeated slots of block 0 disturb nothing outside of block 0."""
    key_cache, value_cache = _caches(layout, torch.float32)
    slots = torch.tensor([5, 0, 0, 1, 0])
    key, value = torch.randn(5, KV_HEADS, DIM), torch.randn(5, KV_HEADS, VALUE_DIM)
    write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache[1, 1], key[0])
    assert (key_cache[2:] == -1).all()
    assert (value_cache[1, 2:] == -1).all()


def test_no_rows() -> None:
    key_cache, value_cache = _caches("paired", torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    write_kv(torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, VALUE_DIM), key_cache, value_cache, none)
    assert (key_cache == -1).all()


@pytest.mark.parametrize("layout", ["split", "paired"])
@pytest.mark.parametrize("slot", [-1, BLOCKS * BLOCK_SIZE])
def test_a_slot_outside_of_the_cache_raises_on_cpu(layout: str, slot: int) -> None:
    """covers: A10. -1 never means the last slot."""
    key_cache, value_cache = _caches(layout, torch.float32)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        write_kv(
            torch.zeros(1, KV_HEADS, DIM),
            torch.zeros(1, KV_HEADS, VALUE_DIM),
            key_cache,
            value_cache,
            torch.tensor([slot]),
        )
    assert (key_cache == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, KV_HEADS, DIM + 1)}, "key has shape"),
        ({"value": torch.zeros(2, 1, VALUE_DIM)}, "value has shape"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots are torch.int32"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots are torch.int64 \(3,\), expected torch.int64 \(2,\)"),
        ({"key": torch.zeros(2, KV_HEADS, DIM, device="meta")}, "key is on meta"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    key_cache, value_cache = _caches("split", torch.float32)
    arguments = {
        "key": torch.zeros(2, KV_HEADS, DIM),
        "value": torch.zeros(2, KV_HEADS, VALUE_DIM),
        "slots": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **change}, key_cache=key_cache, value_cache=value_cache)


def test_a_value_cache_of_fewer_blocks_is_not_written_beyond() -> None:
    """covers: A10"""
    key_cache, value_cache = _caches("split", torch.float32)
    key, value = torch.ones(1, KV_HEADS, DIM), torch.ones(1, KV_HEADS, VALUE_DIM)
    with pytest.raises((IndexError, RuntimeError)):
        write_kv(key, value, key_cache, value_cache[:2], torch.tensor([BLOCKS * BLOCK_SIZE - 1]))
    assert (value_cache == -1).all()
