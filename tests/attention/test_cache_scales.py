"""Scales of a narrow cache: attention in its units is that of the unscaled tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from vllm_gaudi_ucm.attention.cache_scales import CacheScales


@pytest.mark.parametrize("heads", [1, 2])
def test_units_of_the_cache(heads: int) -> None:
    """One scale, or one for each head of keys, which two query heads read. Powers of two round nothing."""
    torch.manual_seed(0)
    layer: Any = SimpleNamespace(
        _k_scale=torch.tensor([0.5, 4.0][:heads]).squeeze(), _v_scale=torch.tensor([2.0, 0.25][:heads]).squeeze()
    )
    scales = CacheScales.from_layer(layer, torch.float32)
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    given = [tensor.clone() for tensor in (query, key, value)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in tensors)
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1).contiguous()

    scaled = scales.divide(query, key, value)
    assert not torch.equal(scaled[1], key)
    torch.testing.assert_close(scales.restore(attend(*scaled), 2), attend(query, key, value))
    assert all(map(torch.equal, given, (query, key, value))), "rows are the model's"
