"""Helpers of `test_steady_plan.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(found: Any, expected: Any, name: str = "plan") -> None:
    """Equal in every field, shape and type."""
    assert type(found) is type(expected), name
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected, err_msg=name, strict=True)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), name
        names = getattr(expected, "_fields", range(len(expected)))
        for part, one, other in zip(names, found, expected, strict=True):
            assert_same(one, other, f"{name}.{part}")
    else:
        assert found == expected, name
