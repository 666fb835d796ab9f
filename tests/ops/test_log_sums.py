"""Attention to some keys and to others, merged by the logarithms of their sums, is attention to all of them."""

from __future__ import annotations

import pytest
import torch

from tests.ops.log_sums import check_log_sums


@pytest.mark.parametrize("implementation", ["reference", "cpu", "hpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_merged_by_them_is_attention_to_all(implementation: str, dtype: torch.dtype) -> None:
    check_log_sums(implementation, dtype)
