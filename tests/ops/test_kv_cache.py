"""The KV-cache write: slots, strided caches, casts, pads."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi_ucm.ops.kv_cache.api import write_kv

SLOTS, KV_HEADS, DIM, VALUE_DIM = 20, 2, 16, 24
LAYOUTS = ("dense", "paired", "heads_first")


def _caches(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    def empty(dim: int) -> torch.Tensor:
        if layout == "dense":  # as the engine allocates them
            return torch.full((SLOTS, KV_HEADS, dim), -1.0, dtype=dtype)
        if layout == "paired":  # something else behind each row
            return torch.full((SLOTS, 2, KV_HEADS, dim), -1.0, dtype=dtype)[:, 0]
        return torch.full((KV_HEADS, SLOTS, dim), -1.0, dtype=dtype).transpose(0, 1)

    return empty(DIM), empty(VALUE_DIM)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_lands_in_its_slot_and_nowhere_else(layout: str, dtype: torch.dtype) -> None:
    """covers: A10. Every other slot keeps what it had, in views with and without holes."""
    key_rows, value_rows = _caches(layout, dtype)
    slots = torch.tensor([4, 19, 7, 8])
    key, value = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, VALUE_DIM)
    found = write_kv(key, value, key_rows, value_rows, slots)
    assert found[0] is key_rows
    assert found[1] is value_rows
    for tokens, cache in ((key, key_rows), (value, value_rows)):
        assert torch.equal(cache[slots], tokens.to(dtype))
        others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
        assert (cache[others] == -1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pads_repeat_dummy_slots(layout: str) -> None:
    """covers: A10. Repeated slots of the dummy block, here of 4 tokens, disturb nothing outside of it."""
    key_rows, value_rows = _caches(layout, torch.float32)
    slots = torch.tensor([5, 0, 0, 1, 0])
    key, value = torch.randn(5, KV_HEADS, DIM), torch.randn(5, KV_HEADS, VALUE_DIM)
    write_kv(key, value, key_rows, value_rows, slots)
    assert torch.equal(key_rows[5], key[0])
    assert (key_rows[6:] == -1).all()
    assert (value_rows[6:] == -1).all()


def test_no_rows() -> None:
    key_rows, value_rows = _caches("paired", torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    write_kv(torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, VALUE_DIM), key_rows, value_rows, none)
    assert (key_rows == -1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_of_the_cache_raises_on_cpu(layout: str, slot: int) -> None:
    """covers: A10. -1 never means the last slot."""
    key_rows, value_rows = _caches(layout, torch.float32)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        write_kv(
            torch.zeros(1, KV_HEADS, DIM),
            torch.zeros(1, KV_HEADS, VALUE_DIM),
            key_rows,
            value_rows,
            torch.tensor([slot]),
        )
    assert (key_rows == -1).all()


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
    key_rows, value_rows = _caches("dense", torch.float32)
    arguments = {
        "key": torch.zeros(2, KV_HEADS, DIM),
        "value": torch.zeros(2, KV_HEADS, VALUE_DIM),
        "slots": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **change}, key_rows=key_rows, value_rows=value_rows)


def test_a_value_rows_of_fewer_slots_is_not_written_beyond() -> None:
    """covers: A10"""
    key_rows, value_rows = _caches("dense", torch.float32)
    key, value = torch.ones(1, KV_HEADS, DIM), torch.ones(1, KV_HEADS, VALUE_DIM)
    with pytest.raises((IndexError, RuntimeError)):
        write_kv(key, value, key_rows, value_rows[:8], torch.tensor([SLOTS - 1]))
    assert (value_rows == -1).all()
