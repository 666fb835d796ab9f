"""Helpers of `test_tensor_parallel.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}
