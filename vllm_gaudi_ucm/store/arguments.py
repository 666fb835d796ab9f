"""Checks of what callers hand to a store: keys and buffers."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_gaudi_ucm.store.block_key import KEY_BYTES


def check_keys(keys: Iterable[bytes]) -> None:
    """Raises ValueError unless every key has 32 bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ValueError(f"key: found {found}, expected {KEY_BYTES} bytes")


def check_block_bytes(block_bytes: int, capacity: int | None) -> None:
    """Raises ValueError for a block of no size, or one that would not fit alone."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes: found {block_bytes}, expected at least 1")
    if capacity is not None and capacity < block_bytes:
        raise ValueError(f"store.capacity: found {capacity} bytes, expected room for one block of {block_bytes} bytes")


def block_view(name: str, buffer: memoryview, block_bytes: int, *, writable: bool) -> memoryview:
    """The buffer as bytes. Raises ValueError unless it is contiguous, of the block's size and, if asked, writable."""
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes != block_bytes or (writable and view.readonly):
        found = f"{view.nbytes} bytes" + (", read-only" if view.readonly else "")
        found += "" if view.c_contiguous else ", not contiguous"
        expected = f"{block_bytes} contiguous{' writable' if writable else ''} bytes"
        raise ValueError(f"{name}: found {found}, expected {expected}")
    return view.cast("B")
