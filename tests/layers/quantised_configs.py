"""Helpers of `test_quantised_configs.py` that other tests use, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def arguments(kind: str, bits: int, strategy: str, **more: Any) -> SimpleNamespace:
    plain = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None}
    return SimpleNamespace(**{**plain, "type": kind, "num_bits": bits, "strategy": strategy, **more})
