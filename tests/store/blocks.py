"""Blocks and keys with recognisable content."""

from __future__ import annotations

import hashlib
import random
from typing import Any

BLOCK_BYTES = 4096


def key(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def block(number: int, size: int = BLOCK_BYTES) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def loaded(store: Any, number: int, size: int = BLOCK_BYTES) -> bytes | None:
    """What the store gives for a key, None for a miss."""
    into = bytearray(b"\xee" * size)
    return bytes(into) if store.load(key(number), memoryview(into)) else None


def holds(store: Any, numbers: range | list[int]) -> list[int]:
    """The numbers whose blocks can be loaded, in full and unchanged."""
    there = [number for number in numbers if (found := loaded(store, number)) is not None and found == block(number)]
    assert [
        n for n, is_there in zip(numbers, store.lookup([key(n) for n in numbers]), strict=True) if is_there
    ] == there
    return there
